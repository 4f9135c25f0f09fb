"""`convert`, `reshard` and `extract` keep every bit, write whole or not at all, and replace nothing unasked."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from composer_checkpoint import load_file, load_sharded, save_file, save_sharded, verify
from composer_checkpoint.local_files import merge_local
from composer_checkpoint.tensors import open_checkpoint


def weights_of(path):
    with open_checkpoint(path) as source:
        return {name: tensor.read() for name, tensor in source.weights.items()}


def same(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("target", ["out.pt", "out.safetensors", "out"])
def test_weights_stay_the_same_in_each_format(target, content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    more = [] if "." in target else ["--to", "dcp"]
    assert run("convert", tmp_path / "ep2.pt", tmp_path / target, *more)[0] == 0
    same(content["state"]["model"], weights_of(tmp_path / target))
    assert verify(tmp_path / target) is not None


def test_all_of_a_state_goes_along_on_request(content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    code, out, _ = run("convert", tmp_path / "ep2.pt", tmp_path / "weights.pt")
    assert code == 0
    assert "left out: optimizers, timestamp" in out
    assert set(load_file(tmp_path / "weights.pt")["state"]) == {"model", "metadata"}
    assert run("convert", tmp_path / "ep2.pt", tmp_path / "all", "--to", "dcp", "--optimizer", "--resumption")[0] == 0
    assert run("convert", tmp_path / "all", tmp_path / "back.pt", "--optimizer", "--resumption")[0] == 0
    back = load_file(tmp_path / "back.pt")
    assert back["state"]["timestamp"] == content["state"]["timestamp"]
    assert [tuple(item) for item in back["state"]["algorithms"]] == content["state"]["algorithms"]
    own, found = content["state"]["optimizers"]["AdamW"], back["state"]["optimizers"]["AdamW"]
    assert found["param_groups"] == own["param_groups"]
    assert torch.equal(found["state"]["layer.weight"]["exp_avg"], own["state"]["layer.weight"]["exp_avg"])
    assert torch.equal(back["rng"][1]["torch"], content["rng"][1]["torch"])


def test_names_are_chosen_and_changed(content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    arguments = ["--exclude", "tied*", "--include", "*weight", "--include", "half", "--rename", "^layer=block"]
    assert run("convert", tmp_path / "ep2.pt", tmp_path / "out.pt", *arguments)[0] == 0
    assert weights_of(tmp_path / "out.pt").keys() == {"block.weight", "half"}
    code, _, errors = run("convert", tmp_path / "ep2.pt", tmp_path / "two.pt", "--rename", "half|count=one")
    assert code == 2
    assert "'one'" in errors


def test_a_cast_leaves_whole_numbers_alone(content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    run("convert", tmp_path / "ep2.pt", tmp_path / "out.pt", "--output-precision", "fp16")
    found, expected = weights_of(tmp_path / "out.pt"), content["state"]["model"]
    assert torch.equal(found["layer.weight"], expected["layer.weight"].half())
    assert found["count"].dtype == torch.int64


def test_a_sharded_checkpoint_is_cut_for_other_ranks(content, run, run_json, tmp_path):
    save_sharded(content, tmp_path / "one")
    code, told = run_json("reshard", tmp_path / "one", tmp_path / "three", "--world-size", "3")
    assert code == 0
    assert told["files"] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"} <= set(os.listdir(tmp_path / "three"))
    target = {"state": {"model": {name: torch.zeros_like(t) for name, t in content["state"]["model"].items()}}}
    load_sharded(target, tmp_path / "three", strict=False)
    same(content["state"]["model"], target["state"]["model"])
    assert run("diff", tmp_path / "one", tmp_path / "three", "--all")[0] == 0


def test_per_rank_files_are_cut_for_other_ranks(content, run, tmp_path):
    from composer_checkpoint.local_files import save_local

    save_local(content, tmp_path / "one_{rank}.pt")
    assert run("reshard", tmp_path / "one_{rank}.pt", tmp_path / "two_{rank}.pt", "--world-size", "2")[0] == 0
    same(content["state"]["model"], merge_local(tmp_path / "two_{rank}.pt")["state"]["model"])


def test_safetensors_are_cut_by_size(content, run, run_json, tmp_path):
    save_file(content["state"]["model"], tmp_path / "w.safetensors")
    code, told = run_json("reshard", tmp_path / "w.safetensors", tmp_path / "out", "--max-shard-size", "60")
    assert code == 0
    assert len(told["files"]) == 2
    assert run("diff", tmp_path / "w.safetensors", tmp_path / "out")[0] == 0


def test_some_tensors_are_extracted(content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    arguments = ["--include", "layer*", "--include", "*exp_avg"]
    assert run("extract", tmp_path / "ep2.pt", tmp_path / "some.safetensors", *arguments)[0] == 0
    found = load_file(tmp_path / "some.safetensors")
    assert sorted(found) == ["layer.weight", "state/optimizers/AdamW/state/layer.weight/exp_avg"]
    assert run("extract", tmp_path / "ep2.pt", tmp_path / "rest.json")[0] == 0
    assert json.loads((tmp_path / "rest.json").read_text())["state"]["run_name"] == "blue-fox"


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "ep2.pt", "there.pt"],
        ["convert", "ep2.pt", "there", "--to", "dcp"],
        ["extract", "ep2.pt", "there.safetensors"],
        ["reshard", "sharded", "there", "--world-size", "2"],
    ],
)
def test_what_is_there_stays_unless_it_may_be_replaced(arguments, content, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(content, "ep2.pt")
    save_sharded(content, "sharded")
    there = tmp_path / arguments[2]
    there.mkdir()
    (there / "mine").write_text("precious")
    code, _, errors = run(*arguments)
    assert code == 1
    assert "exists" in errors
    assert (there / "mine").read_text() == "precious"
    assert run(*arguments, "--overwrite")[0] == 0
    assert not (there / "mine").exists()


def test_a_dry_run_writes_nothing_and_says_what_it_would(content, run_json, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    code, told = run_json("convert", tmp_path / "ep2.pt", tmp_path / "out.safetensors", "--dry-run")
    assert code == 0
    assert told.keys() == {
        "schema", "source", "target", "formats", "shards", "dropped_aliases", "renamed", "cast", "peak_bytes",
        "warnings", "written",
    }  # fmt: skip
    assert told["shards"][0]["tensors"] == ["layer.weight", "half", "count"]
    assert not told["written"]
    assert os.listdir(tmp_path) == ["ep2.pt"]


@pytest.mark.parametrize("more", [["out.pt"], ["out.safetensors"], ["out", "--to", "dcp"]])
def test_a_disk_that_fills_up_leaves_nothing(more, content, run, tmp_path, monkeypatch):
    save_file(content, tmp_path / "ep2.pt")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    code, _, errors = run("convert", "ep2.pt", *more)
    assert code == 1
    assert "space" in errors
    assert os.listdir() == ["ep2.pt"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(how, tmp_path):
    save_file({f"w{i}": torch.ones(1000) for i in range(200)}, tmp_path / "big.pt")
    code = (
        "import sys, time\nfrom composer_checkpoint.tensors import StoredTensor\n"
        "read = StoredTensor.read\n"
        "def slow(self):\n    time.sleep(0.05)\n    return read(self)\n"
        "StoredTensor.read = slow\n"
        "from composer_ckpt.cli import main\nsys.exit(main(['convert', sys.argv[1], sys.argv[2], '--to', 'dcp']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "big.pt", tmp_path / "out"])
    deadline = time.monotonic() + 60
    while not [*tmp_path.rglob("*.distcp")] and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    assert process.wait(timeout=60) != 0
    assert not (tmp_path / "out").exists()
    if how == signal.SIGINT:
        assert os.listdir(tmp_path) == ["big.pt"]


def test_a_write_to_a_store_is_refused_with_a_reason(content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    code, _, errors = run("convert", tmp_path / "ep2.pt", "s3://bucket/out.pt")
    assert code == 2
    assert "on this machine" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "w.pt", "out.pt", "--peft", "merge"], "--peft"),
        (["convert", "w.pt", "out.pt", "--include", "nothing*"], "fits none"),
        (["convert", "w.pt", "out.safetensors", "--optimizer"], "weights alone"),
        (["convert", "empty.pt", "out.pt"], "no weights"),
        (["reshard", "w.pt", "out", "--world-size", "2"], "not cut"),
        (["extract", "w.pt", "out.txt"], ".safetensors, .pt and .json"),
    ],
)
def test_arguments_that_do_not_fit_are_usage_errors(arguments, words, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(2)}, "w.pt")
    save_file({"state": {"run_name": "x"}}, "empty.pt")
    code, _, errors = run(*arguments)
    assert code == 2
    assert words in errors
    assert sorted(os.listdir()) == ["empty.pt", "w.pt"]
