"""Adapters of peft."""

import copy
import warnings

import pytest
import torch

from composer_checkpoint import load_file
from composer_hf import (
    HuggingFaceModel,
    filter_state_dict_peft,
    get_peft_config_from_composer_state_dict,
    maybe_get_underlying_model,
)
from composer_hf import write_huggingface_pretrained_from_composer_checkpoint as write_folder
from composer_models import MissingConditionalImportError

peft = pytest.importorskip("peft")

# peft 0.21 asks models of transformers 5 by an older name of the property.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, **options)


def shaken(model):
    """Give an adapter weights other than the zeros it begins with."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model.eval()


def test_a_checkpoint_has_the_adapter_alone(make_model):
    model = HuggingFaceModel(make_model("gpt2"), peft_config=lora())

    assert len(model.state_dict()) == 4  # two layers with two factors each
    model.should_save_peft_only = False
    assert len(model.state_dict()) > 4


def test_an_adapters_weights_are_loaded_onto_the_base(make_model, batch):
    base = make_model("gpt2")
    model = shaken(HuggingFaceModel(copy.deepcopy(base), peft_config=lora()))
    other = HuggingFaceModel(base, peft_config=lora()).eval()

    other.load_state_dict(model.state_dict())

    assert torch.equal(other(batch).logits, model(batch).logits)


def test_a_missing_weight_of_the_adapter_is_an_error(make_model):
    model = HuggingFaceModel(make_model("gpt2"), peft_config=lora())
    weights = model.state_dict()
    name, _ = weights.popitem()

    with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
        model.load_state_dict(weights)


@pytest.mark.parametrize("format", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": "lora_only"}, {"bias": "all"}, {"modules_to_save": ["wpe"]}, {"use_dora": True}],
    ids=["plain", "its biases", "all biases", "a module", "dora"],
)
def test_peft_loads_the_folder_of_a_checkpoint(format, options, make_model, batch, save, tmp_path):
    base = make_model("gpt2")
    model = shaken(HuggingFaceModel(copy.deepcopy(base), peft_config=lora(**options)))

    folder = write_folder(save(model), tmp_path / "out", format=format)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as peft gives it for keys that are missing
        loaded = peft.PeftModel.from_pretrained(base, folder).eval()

    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", f"adapter_model.{format}"}
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(batch).logits)


def test_a_checkpoint_tells_the_adapters_configuration(make_model, save):
    content = load_file(save(HuggingFaceModel(make_model("gpt2"), peft_config=lora(r=3))))
    plain = load_file(save(HuggingFaceModel(make_model("gpt2")), "plain.pt"))

    assert get_peft_config_from_composer_state_dict(content).r == 3
    assert get_peft_config_from_composer_state_dict(plain) is None


def test_a_model_is_adapted_again_as_its_checkpoint_says(make_model, save):
    model = HuggingFaceModel(make_model("gpt2"), peft_config=lora())

    again, _ = HuggingFaceModel.hf_from_composer_checkpoint(str(save(model)), load_weights=True)

    assert isinstance(again, peft.PeftModel)
    assert again.state_dict().keys() == model.model.state_dict().keys()


def test_names_are_lowered_or_raised_by_users(make_model):
    config = lora()
    config.peft_type, config.task_type = "lora", "causal_lm"

    assert HuggingFaceModel(make_model("gpt2"), peft_config=config).using_peft


def test_another_kind_of_adapter_is_refused(make_model):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)

    with pytest.raises(ValueError, match="PEFT type PROMPT_TUNING is not supported by HuggingFaceModel"):
        HuggingFaceModel(make_model("gpt2"), peft_config=config)
    with pytest.raises(NotImplementedError, match="Only LoRA PEFT is supported"):
        filter_state_dict_peft({}, config)


def test_an_adapted_model_is_not_adapted_twice(make_model):
    adapted = peft.get_peft_model(make_model("gpt2"), lora())

    with pytest.warns(UserWarning, match="PEFT model was passed in directly. Ignoring the provided PEFT config."):
        model = HuggingFaceModel(adapted, peft_config=lora())
    assert model.model is adapted
    assert maybe_get_underlying_model(adapted) is adapted.get_base_model()
    assert model.shift_labels


def test_the_extra_that_brings_peft_is_named(make_model, monkeypatch):
    monkeypatch.setattr("composer_hf.model.peft_installed", False)

    with pytest.raises(MissingConditionalImportError, match="composer-hf\\[peft\\]"):
        HuggingFaceModel(make_model("gpt2"), peft_config=lora())


def test_names_lose_the_adapters_or_keep_it():
    weights = {"a.lora_A.default.weight": 1, "a.lora_A.other.weight": 2, "a.weight": 3}

    assert filter_state_dict_peft(weights, lora()) == {"a.lora_A.weight": 1}
    assert filter_state_dict_peft(weights, lora(), "other", remove_adapter_names=False) == {"a.lora_A.other.weight": 2}


def test_a_checkpoint_without_what_was_trained_by_hand_is_loaded_with_a_warning(make_model):
    """Before, such a norm kept the values that it began with, and nothing was said."""
    model = HuggingFaceModel(make_model("gpt2"), peft_config=lora())
    weights = model.state_dict()
    model.model.base_model.model.transformer.ln_f.weight.requires_grad_(True)

    with pytest.warns(UserWarning, match=r"without 1 weights .* stay as they are here: .*ln_f\.weight"):
        model.load_state_dict(weights)


def test_what_is_frozen_later_was_trained_and_is_saved(make_model):
    """Before, what was trained by hand was never saved, so that freezing it could not lose it."""
    adapted = peft.get_peft_model(make_model("gpt2"), lora())
    norm = adapted.base_model.model.transformer.ln_f.weight.requires_grad_(True)
    model = HuggingFaceModel(adapted)
    norm.requires_grad_(False)  # as LayerFreezing does

    assert [name for name in model.state_dict() if "lora_" not in name] == [
        "model.base_model.model.transformer.ln_f.weight"
    ]
