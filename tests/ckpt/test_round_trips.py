"""Weights go to and from Hugging Face folders without a bit of difference, and strangers load what comes out."""

import json
import os

import pytest
import torch
from safetensors import safe_open

from composer_checkpoint import load_file, load_sharded, save_file, save_sharded

AUTO = {
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "mixtral": "AutoModelForCausalLM",
}


def on_disk(folder):
    """Read a folder's tensors with the reference reader."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            with safe_open(folder / name, "pt") as file:
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dict
    return found


def same(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


def logits_of(model):
    """Return what the model says, computed by one thread, as the stranger does: more of them add up otherwise."""
    ids = torch.arange(1, 9).reshape(2, 4)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return model(input_ids=ids, **more).logits
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", AUTO)
def test_a_folder_comes_back_from_a_checkpoint_bit_for_bit(name, make_model, ckpt, tmp_path):
    make_model(name).save_pretrained(tmp_path / "first")
    assert ckpt("convert", tmp_path / "first", tmp_path / "there.pt")[0] == 0
    code, plan = ckpt("convert", tmp_path / "there.pt", tmp_path / "back", "--max-shard-size", "2kB")
    assert code == 0
    assert len(plan["shards"]) > 1
    same(on_disk(tmp_path / "first"), on_disk(tmp_path / "back"))


@pytest.mark.parametrize("name", AUTO)
def test_a_checkpoint_comes_back_from_a_folder_with_its_names_and_ties(name, make_model, checkpoint_of, ckpt, tmp_path):
    content = checkpoint_of(make_model(name))
    save_file(content, tmp_path / "first.pt")
    assert ckpt("convert", tmp_path / "first.pt", tmp_path / "there")[0] == 0
    assert ckpt("convert", tmp_path / "there", tmp_path / "back.pt")[0] == 0
    expected, found = content["state"]["model"], load_file(tmp_path / "back.pt")["state"]["model"]
    same(expected, found)
    own = {weight.data_ptr() for weight in expected.values()}
    assert len({weight.data_ptr() for weight in found.values()}) == len(own)


def test_methods_that_a_folder_does_not_contain_are_reported(make_model, checkpoint_of, ckpt, tmp_path):
    content = checkpoint_of(make_model("gpt2"))
    content["state"]["algorithms"] = [("LogitSoftcap", {"repr": "LogitSoftcap(cap=30.0)"}), ("EMA", {})]
    content["state"]["model"]["multi_token_heads.0.linear.bias"] = torch.zeros(4)  # of MultiTokenPrediction
    save_file(content, tmp_path / "ep1.pt")
    code, plan = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")
    assert code == 0
    assert [note for note in plan["warnings"] if "trained with LogitSoftcap, which" in note]
    make_model("gpt2").save_pretrained(tmp_path / "plain")
    same(on_disk(tmp_path / "plain"), on_disk(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("name", AUTO)
def test_strangers_load_a_folder_and_get_the_same_logits(name, make_model, checkpoint_of, ckpt, stranger, tmp_path):
    model = make_model(name)
    save_file(checkpoint_of(model), tmp_path / "ep1.pt")
    ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", "--max-shard-size", "2kB")
    told = stranger(tmp_path / "out", AUTO[name])
    assert told["class"] == type(model).__name__
    assert told["dtype"] == "torch.float32"
    assert torch.equal(torch.tensor(told["logits"], dtype=torch.float64), logits_of(model).double())


@pytest.mark.slow
@pytest.mark.parametrize("name", AUTO)
def test_the_other_release_of_transformers_loads_a_folder_as_well(
    name, root, make_model, checkpoint_of, ckpt, stranger, tmp_path
):
    python = root / ".venv-transformers4" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no environment with transformers 4 at .venv-transformers4")
    model = make_model(name)
    save_file(checkpoint_of(model), tmp_path / "ep1.pt")
    ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")
    told = stranger(tmp_path / "out", AUTO[name], python=python)
    logits = torch.tensor(told["logits"], dtype=torch.float64)
    # Releases compute in another order: a few roundings of float32 at numbers below 10.
    torch.testing.assert_close(logits, logits_of(model).double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_cast_is_rounded_once_and_said_in_the_config(name, make_model, checkpoint_of, ckpt, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "fp32")
    save_file(checkpoint_of(model), tmp_path / "ep1.pt")
    _, plan = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "bf16", "--output-precision", "bf16")
    assert list(plan["cast"]) == ["float32 -> bfloat16"]
    same({key: weight.bfloat16() for key, weight in on_disk(tmp_path / "fp32").items()}, on_disk(tmp_path / "bf16"))
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("save", [save_file, save_sharded])
def test_tied_weights_are_written_once(save, make_model, checkpoint_of, ckpt, tmp_path):
    save(checkpoint_of(make_model("gpt2")), tmp_path / "ep1")
    _, plan = ckpt("convert", tmp_path / "ep1", tmp_path / "out")
    assert plan["dropped_aliases"] == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in on_disk(tmp_path / "out")


def test_tied_weights_that_differ_are_refused(make_model, checkpoint_of, ckpt, tmp_path):
    content = checkpoint_of(make_model("gpt2"))
    content["state"]["model"]["model.lm_head.weight"] = torch.zeros(50, 8)
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")
    assert code == 1
    assert "tie_word_embeddings" in told["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_a_sharded_checkpoint_becomes_a_folder_and_the_folder_a_sharded_one(make_model, checkpoint_of, ckpt, tmp_path):
    model = make_model("llama")
    content = checkpoint_of(model)
    save_sharded(content, tmp_path / "ep1")
    assert ckpt("convert", tmp_path / "ep1", tmp_path / "out")[0] == 0
    assert ckpt("convert", tmp_path / "out", tmp_path / "again", "--to", "dcp")[0] == 0
    target = {"state": {"model": {name: torch.zeros_like(t) for name, t in content["state"]["model"].items()}}}
    load_sharded(target, tmp_path / "again", strict=False)
    same(content["state"]["model"], target["state"]["model"])


@pytest.mark.slow
def test_a_folder_of_pickles_loads_too(make_model, checkpoint_of, ckpt, stranger, tmp_path):
    model = make_model("gpt2")
    save_file(checkpoint_of(model), tmp_path / "ep1.pt")
    ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out", "--format", "bin")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "pytorch_model.bin"]
    told = stranger(tmp_path / "out")
    assert torch.equal(torch.tensor(told["logits"], dtype=torch.float64), logits_of(model).double())


def test_bare_weights_become_a_folder_with_a_config_given(make_model, ckpt, tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path / "first")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    code, told = ckpt("convert", tmp_path / "bare.pt", tmp_path / "out")
    assert code == 1
    assert "--config" in told["error"]["message"]
    assert ckpt("convert", tmp_path / "bare.pt", tmp_path / "out", "--config", tmp_path / "first")[0] == 0
    same(on_disk(tmp_path / "first"), on_disk(tmp_path / "out"))


def test_a_config_without_the_models_class_is_told(make_model, ckpt, tmp_path):
    torch.save(make_model("llama").state_dict(), tmp_path / "bare.pt")
    (tmp_path / "config.json").write_text("{}")
    code, told = ckpt("convert", tmp_path / "bare.pt", tmp_path / "out", "--config", tmp_path / "config.json")
    assert code == 1
    assert "config.json: the configuration does not name the model's class" in told["error"]["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("model.lm_head.weight"), ["not in the checkpoint", "lm_head.weight"]),
        (lambda weights: weights.update({"model.extra": torch.ones(1)}), ["not in the model", "extra"]),
        (lambda weights: weights.update({"model.model.norm.weight": torch.ones(3)}), ["another shape", "norm.weight"]),
    ],
)
def test_weights_that_do_not_fit_the_model_are_named(change, words, make_model, checkpoint_of, ckpt, tmp_path):
    content = checkpoint_of(make_model("llama"))
    change(content["state"]["model"])
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")
    assert code == 1
    assert all(word in told["error"]["message"] for word in words)
    assert os.listdir(tmp_path) == ["ep1.pt"]


def test_a_folder_whose_weights_do_not_fit_its_config_is_told_what_mends_it(make_model, ckpt, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    (tmp_path / "first" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    code, told = ckpt("convert", tmp_path / "first", tmp_path / "out.pt")
    assert code == 1
    assert "Put the config.json that fits into the folder." in told["error"]["message"]  # --config is not for a .pt
    assert "--config" not in told["error"]["message"]


def test_an_unknown_architecture_is_named(make_model, checkpoint_of, ckpt, tmp_path):
    content = checkpoint_of(make_model("gpt2"))
    content["state"]["integrations"]["huggingface"]["model"]["config"]["content"]["model_type"] = "gpt-17"
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")
    assert code == 1
    assert "gpt-17" in told["error"]["message"]


def test_code_that_a_checkpoint_brings_is_neither_run_nor_written(make_model, checkpoint_of, ckpt, tmp_path):
    content = checkpoint_of(make_model("gpt2"))
    saved = content["state"]["integrations"]["huggingface"]
    saved["model"]["config"]["class"] = "evil.Model"
    saved["tokenizer"] = {"tokenization_evil.py": {"file_extension": ".py", "content": "raise SystemExit('run')"}}
    save_file(content, tmp_path / "ep1.pt")
    code, told = ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")
    assert code == 4
    assert "evil.Model" in told["error"]["message"]
    saved["model"]["config"]["class"] = "transformers.GPT2LMHeadModel"
    save_file(content, tmp_path / "ep1.pt")
    assert ckpt("convert", tmp_path / "ep1.pt", tmp_path / "out")[0] == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
