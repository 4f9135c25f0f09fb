"""A dry run refuses what writing would refuse, in the same words."""

import json
import sys
import types

import pytest
import torch
from safetensors.torch import save_file as save_safetensors

from composer_checkpoint import save_file


class Thing:
    """More than data."""


def put_in_a_module(monkeypatch):
    module = types.ModuleType("someones_module")
    monkeypatch.setitem(sys.modules, "someones_module", module)
    monkeypatch.setattr(Thing, "__module__", "someones_module")
    module.Thing = Thing


WEIGHTS = {
    "complex": {"w": torch.ones(2, dtype=torch.complex128)},
    "sparse": {"w": torch.eye(2).to_sparse()},
    "half a character": {"w\ud800": torch.ones(2)},
    "the header's name": {"__metadata__": torch.ones(2)},
    "bits": {"w": torch.ones(2, dtype=torch.uint8).view(torch.bits8)},
    "a long name": {"w" * 2000: torch.ones(2)},
    "fine": {"w": torch.ones(2)},
}
TARGETS = [("out.pt",), ("out.safetensors",), ("out", "--to", "dcp"), ("out_{rank}.pt", "--world-size", "2")]
REFUSED = {
    "out.pt": set(),
    "out.safetensors": {"complex", "sparse", "half a character", "the header's name", "bits"},
    "out": {"sparse", "bits", "a long name"},
    "out_{rank}.pt": {"sparse"},
}


@pytest.fixture
def both(run, tmp_path, monkeypatch):
    """Run a command dry and then really, and return the code and the errors, which are alike."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        before = sorted(tmp_path.iterdir())
        dry_code, _, dry_errors = run(*arguments, "--dry-run")
        assert sorted(tmp_path.iterdir()) == before
        code, _, errors = run(*arguments)
        # Without what transformers warns of once.
        dry_errors, errors = (text.partition("composer-ckpt: ")[2] for text in (dry_errors, errors))
        assert (dry_code, dry_errors) == (code, errors)
        return code, errors

    return call


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[0])
@pytest.mark.parametrize("name", WEIGHTS)
def test_of_convert(name, target, both):
    torch.save(WEIGHTS[name], "a.pt")
    code, errors = both("convert", "a.pt", *target)
    assert code == (1 if name in REFUSED[target[0]] else 0), errors


@pytest.mark.parametrize("target", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_of_extract(name, target, both):
    torch.save(WEIGHTS[name], "a.pt")
    code, errors = both("extract", "a.pt", target)
    assert code == (1 if name in REFUSED[target] else 0), errors


@pytest.mark.parametrize("target", [("out.pt",), *TARGETS[2:]], ids=lambda target: target[0])
def test_of_what_is_more_than_data(target, both, monkeypatch):
    put_in_a_module(monkeypatch)
    torch.save({"state": {"model": {"w": torch.ones(2)}, "callbacks": {"mine": Thing()}}}, "a.pt")
    code, errors = both("convert", "a.pt", *target, "--trust", "--resumption")
    assert (code, "state/callbacks/mine (someones_module.Thing)" in errors) == (4, True), errors
    assert both("convert", "a.pt", *target, "--trust")[0] == 0


def test_of_reshard(both, tmp_path):
    torch.save(WEIGHTS["complex"], "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    code, errors = both("reshard", ".", "out", "--max-shard-size", "1KB")
    assert (code, "w is torch.complex128, which safetensors has no form for" in errors) == (1, True), errors


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_of_a_hugging_face_folder(format, both, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=4, n_head=2, n_layer=1, vocab_size=10, n_positions=8, architectures=["GPT2LMHeadModel"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    weights = dict(GPT2LMHeadModel(config).state_dict())
    torch.save(weights | {"transformer.ln_f.bias": torch.ones(4, dtype=torch.complex128)}, "a.pt")
    target = ("out", "--config", "config.json", "--format", format)
    code, errors = both("convert", "a.pt", *target)
    assert (code, "ln_f.bias is torch.complex128" in errors) == ((1, True) if format == "safetensors" else (0, False))


def test_of_tied_weights_that_differ(both, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=4, n_head=2, n_layer=1, vocab_size=10, n_positions=8, architectures=["GPT2LMHeadModel"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    weights = {name: tensor.clone() for name, tensor in GPT2LMHeadModel(config).state_dict().items()}
    weights["lm_head.weight"] += 1
    save_safetensors(weights, "a.safetensors")
    code, errors = both("convert", "a.safetensors", "out", "--config", "config.json")
    assert (code, "has other values for it" in errors) == (1, True), errors
    save_file(weights | {"lm_head.weight": weights["transformer.wte.weight"]}, "b.safetensors")
    assert both("convert", "b.safetensors", "out", "--config", "config.json")[0] == 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[0])
def test_of_what_is_there_already(target, both):
    torch.save(WEIGHTS["fine"], "a.pt")
    assert both("convert", "a.pt", *target)[0] == 0
    code, errors = both("convert", "a.pt", *target)
    assert (code, "overwrite" in errors) == (1, True), errors
