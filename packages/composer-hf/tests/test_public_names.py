import subprocess
import sys

import pytest

import composer_hf

PUBLIC = (
    "ComposerHFCausalLM HuggingFaceCheckpointer HuggingFaceMetadata HuggingFaceModel LMEvalHarness "
    "MissingMetadataError PublishedPiece __version__ filter_state_dict_peft get_hf_config_from_composer_state_dict "
    "get_peft_config_from_composer_state_dict hf_causal_lm hf_from_composer_checkpoint maybe_get_underlying_model "
    "plan_weights prepare_hf_model_for_fsdp write_huggingface_pretrained_from_composer_checkpoint"
)


def test_public_names_change_only_on_purpose():
    assert sorted(composer_hf.__all__) == PUBLIC.split()
    assert all(hasattr(composer_hf, name) for name in composer_hf.__all__)
    assert set(composer_hf.__all__) <= set(dir(composer_hf))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'composer_hf' has no attribute 'HuggingFace'"):
        composer_hf.HuggingFace  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import composer_hf", "torch"),
        ("from composer_hf import HuggingFaceMetadata", "transformers"),
        ("from composer_hf import plan_weights", "transformers"),
        ("from composer_hf import HuggingFaceModel", "transformers"),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(statement, heavy):
    script = f"import sys; {statement}; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
