"""LoRA is written alone or added to its base, as peft itself would do it."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file as load_safetensors

from composer_checkpoint import load_file, save_file

peft = pytest.importorskip("peft")
# Of transformers, about what peft calls.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CONFIGS = {
    "plain": {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True},
    "scaled": {"r": 4, "lora_alpha": 8, "use_rslora": True, "fan_in_fan_out": True},
    "biases": {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True, "bias": "lora_only"},
}


def adapted(make_model, name, adapter_name="default"):
    config = peft.LoraConfig(**{"target_modules": ["c_attn"], "task_type": "CAUSAL_LM", **CONFIGS[name]})
    model = make_model("gpt2")
    described = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    model = peft.get_peft_model(model, config, adapter_name=adapter_name)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    values = json.loads(
        json.dumps(config.to_dict(), default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )
    values["peft_type"], values["task_type"] = "LORA", "CAUSAL_LM"
    entry = {"file_extension": ".json", "class": "transformers.GPT2LMHeadModel"}
    saved = {
        "model": {
            "config": {**entry, "content": json.loads(json.dumps(described))},
            "peft_config": {**entry, "content": values, "class": "peft.LoraConfig"},
        },
        "tokenizer": {},
    }
    weights = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    return model, {"state": {"model": weights, "integrations": {"huggingface": saved}}}


def test_an_adapter_is_written_alone_as_peft_names_it(make_model, ckpt, tmp_path):
    model, content = adapted(make_model, "plain")
    save_file(content, tmp_path / "ep1.pt")
    assert ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")[0] == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["adapter_config.json", "adapter_model.safetensors"]
    model.save_pretrained(tmp_path / "reference")
    expected = load_safetensors(tmp_path / "reference" / "adapter_model.safetensors")
    found = load_safetensors(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    loaded = peft.PeftModel.from_pretrained(make_model("gpt2"), tmp_path / "out")
    ids = torch.arange(1, 9).reshape(2, 4)
    assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_merged_adapter_is_what_peft_merges(name, make_model, ckpt, tmp_path):
    model, content = adapted(make_model, name)
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", "--peft", "merge")
    assert code == 0, told
    expected = model.merge_and_unload().state_dict()
    found = load_safetensors(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


def test_an_adapter_alone_finds_its_base_where_it_is_told(make_model, ckpt, tmp_path):
    model, content = adapted(make_model, "plain")
    make_model("gpt2").save_pretrained(tmp_path / "base")
    weights = content["state"]["model"]
    content["state"]["model"] = {key: tensor for key, tensor in weights.items() if "lora_" in key}
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", "--peft", "merge")
    assert code == 1
    assert "--base-model" in told["error"]["message"]
    arguments = ["--peft", "merge", "--base-model", tmp_path / "base"]
    assert ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", *arguments)[0] == 0
    expected = model.merge_and_unload().state_dict()
    found = load_safetensors(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_biases_that_were_trained_with_an_adapter_are_added_to_its_base(make_model, ckpt, tmp_path):
    model, content = adapted(make_model, "biases")
    make_model("gpt2").save_pretrained(tmp_path / "base")
    trained = {f"model.{key}" for key, parameter in model.named_parameters() if parameter.requires_grad}
    weights = content["state"]["model"]
    content["state"]["model"] = {key: tensor for key, tensor in weights.items() if key in trained}
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", "--peft", "merge")
    assert (code, "--base-model" in told["error"]["message"]) == (1, True)
    arguments = ["--peft", "merge", "--base-model", tmp_path / "base"]
    assert ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", *arguments)[0] == 0
    expected = model.merge_and_unload().state_dict()
    found = load_safetensors(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_an_adapter_of_another_name_is_not_written_as_one_without_weights(make_model, ckpt, tmp_path):
    _, content = adapted(make_model, "plain", adapter_name="mine")
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")
    assert code == 1
    assert "no weights of an adapter called 'default'" in told["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_an_adapter_comes_back_from_its_folder(make_model, ckpt, tmp_path):
    _, content = adapted(make_model, "plain")
    save_file(content, tmp_path / "ep1.pt")
    ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")
    assert ckpt("convert", tmp_path / "out", tmp_path / "back.pt")[0] == 0
    back = load_file(tmp_path / "back.pt")["state"]["model"]
    assert back
    assert all(torch.equal(tensor, content["state"]["model"][key]) for key, tensor in back.items())


def test_a_model_without_an_adapter_is_written_as_it_is(make_model, ckpt, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "first")
    code, told = ckpt("convert", tmp_path / "first", tmp_path / "out", "--peft", "merge")
    assert code == 0, told
    assert "there is no adapter to merge" in told["warnings"]
    assert ckpt("diff", tmp_path / "first", tmp_path / "out")[0] == 0
    assert ckpt("convert", tmp_path / "first", tmp_path / "no", "--peft", "adapter")[0] == 2


@pytest.mark.parametrize(
    "option", [["--base-model", "base"], ["--max-shard-size", "1GB"]], ids=lambda option: option[0]
)
def test_options_of_a_whole_model_are_refused_where_the_adapter_is_written_alone(option, make_model, ckpt, tmp_path):
    _, content = adapted(make_model, "plain")
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", *option)
    assert code == 2
    assert option[0] in told["error"]["message"]
    assert "leave them out." in told["error"]["message"]
    assert not (tmp_path / "out").exists()
