"""An adapter that changes one of two tied weights is merged so that the model computes what it did with the adapter.

peft's own `merge_and_unload` adds LoRA to both of them, so that it is no reference here.
"""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file as load_safetensors

from composer_checkpoint import load_file, save_file
from composer_checkpoint.tensors import open_checkpoint, stream_sharded

peft = pytest.importorskip("peft")
pytestmark = [
    # Of transformers, about what peft calls; of peft, that tied weights are adapted, which is what is tested.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`, but:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
APART = {
    "lora on the embedding": {"target_modules": ["wte"]},
    "lora on the head": {"target_modules": ["lm_head"]},
    "lora on both": {"target_modules": ["wte", "lm_head"]},
    "lora on layers of both kinds": {"target_modules": ["c_attn", "c_proj", "lm_head"]},
    "embedding saved": {"target_modules": ["c_attn"], "modules_to_save": ["wte"]},
    "head saved": {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]},
    "both saved": {"target_modules": ["c_attn"], "modules_to_save": ["wte", "lm_head"]},
    "lora on one and the other saved": {"target_modules": ["wte"], "modules_to_save": ["lm_head"]},
}
TIED = {
    "tied and saved": {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tied lora": {"target_modules": ["wte", "lm_head"], "ensure_weight_tying": True},
    "lora on neither": {"target_modules": ["c_attn"]},
}
IDS = torch.arange(1, 9).reshape(2, 4)


def adapted(model, settings):
    """Return a model with an adapter of which no weight is as it was, in the state in which it is evaluated."""
    own = copy.deepcopy(settings)  # peft adds to the lists that it is given
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3, task_type="CAUSAL_LM", **own)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def as_composer_saves(model):
    """Return the content of a checkpoint of a `HuggingFaceModel` with this one in it."""
    from composer_hf import HuggingFaceModel

    wrapped = HuggingFaceModel(model, tokenizer=None, use_logits=True, should_save_peft_only=False)
    described = {"huggingface": wrapped.get_metadata()}
    return {"state": {"model": wrapped.state_dict(), "integrations": described}}


def logits_of(folder):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits


def merged(ckpt, source, tmp_path, *more):
    code, told = ckpt("convert", source, tmp_path / "out", "--peft", "merge", *more)
    assert code == 0, told
    return told, json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("settings", APART.values(), ids=APART.keys())
def test_a_merged_model_computes_what_the_adapted_one_did(settings, make_model, ckpt, tmp_path):
    model = adapted(make_model("gpt2"), settings)
    save_file(as_composer_saves(model), tmp_path / "ep1.pt")
    told, config = merged(ckpt, tmp_path / "ep1.pt", tmp_path)
    # float32, and LoRA is added to the weights instead of to what they give
    torch.testing.assert_close(logits_of(tmp_path / "out"), model(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    assert config["tie_word_embeddings"] is False
    assert any("tie_word_embeddings is now false" in warning for warning in told["warnings"])


@pytest.mark.parametrize("settings", TIED.values(), ids=TIED.keys())
def test_what_peft_trains_as_one_weight_stays_one(settings, make_model, ckpt, tmp_path):
    model = adapted(make_model("gpt2"), settings)
    save_file(as_composer_saves(model), tmp_path / "ep1.pt")
    told, config = merged(ckpt, tmp_path / "ep1.pt", tmp_path)
    torch.testing.assert_close(logits_of(tmp_path / "out"), model(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_safetensors(tmp_path / "out" / "model.safetensors")
    assert not any("tie_word_embeddings" in warning for warning in told["warnings"])


@pytest.mark.parametrize("settings", [*APART.values(), *TIED.values()], ids=[*APART, *TIED])
def test_an_adapters_folder_is_merged_into_a_base_that_has_tied_weights_once(settings, make_model, ckpt, tmp_path):
    model = adapted(make_model("gpt2"), settings)
    make_model("gpt2").save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    merged(ckpt, tmp_path / "adapter", tmp_path, "--base-model", tmp_path / "base")
    torch.testing.assert_close(logits_of(tmp_path / "out"), model(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)


def test_tied_weights_are_told_by_their_values_where_a_folder_has_them_twice(make_model, ckpt, tmp_path):
    model = adapted(make_model("gpt2"), TIED["tied and saved"])
    save_file(as_composer_saves(model), tmp_path / "ep1.pt")
    with open_checkpoint(tmp_path / "ep1.pt") as source:
        stream_sharded(source.tree, tmp_path / "dcp")
    _, config = merged(ckpt, tmp_path / "dcp", tmp_path)
    assert config["tie_word_embeddings"] is True
    torch.testing.assert_close(logits_of(tmp_path / "out"), model(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_both_weights_are_written_in_each_format_of_a_folder(format, make_model, ckpt, tmp_path):
    model = adapted(make_model("gpt2"), APART["lora on the embedding"])
    save_file(as_composer_saves(model), tmp_path / "ep1.pt")
    merged(ckpt, tmp_path / "ep1.pt", tmp_path, "--format", format)
    torch.testing.assert_close(logits_of(tmp_path / "out"), model(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)


def test_a_model_that_ties_weights_whatever_its_config_says_is_not_merged_to_something_else(make_model, ckpt, tmp_path):
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=r"shared", task_type="SEQ_2_SEQ_LM")
    model = peft.get_peft_model(make_model("t5"), config)
    save_file(as_composer_saves(model), tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", "--peft", "merge", "--dry-run")
    assert code == 1
    assert "has them as one weight also with tie_word_embeddings=False" in told["error"]["message"]


def test_modules_that_are_saved_whole_come_back_from_an_adapters_folder(make_model, ckpt, tmp_path):
    content = as_composer_saves(adapted(make_model("gpt2"), APART["embedding saved"]))
    save_file(content, tmp_path / "ep1.pt")
    assert ckpt("convert", tmp_path / "ep1.pt", tmp_path / "adapter")[0] == 0
    assert ckpt("convert", tmp_path / "adapter", tmp_path / "back.pt")[0] == 0
    back, name = load_file(tmp_path / "back.pt")["state"]["model"], "wte.modules_to_save.default.weight"
    (saved,) = [key for key in back if key.endswith(name)]
    assert torch.equal(back[saved], content["state"]["model"][saved])
