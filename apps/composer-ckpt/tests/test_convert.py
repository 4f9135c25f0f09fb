"""`convert`, `reshard` and `extract` keep every bit, write whole or not at all, and replace nothing unasked."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from fractions import Fraction

import pytest
import torch

from composer_checkpoint import load_file, load_sharded, save_file, save_sharded, verify
from composer_checkpoint.formats.per_rank import merge_local
from composer_checkpoint.tensors import as_stored, open_checkpoint, stream_sharded


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
    from composer_checkpoint.formats.per_rank import save_local

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


WRITING = [
    ["convert", "ep2.pt", "there.pt"],
    ["convert", "ep2.pt", "there", "--to", "dcp"],
    ["extract", "ep2.pt", "there.safetensors"],
    ["reshard", "sharded", "there", "--world-size", "2"],
]


@pytest.fixture
def beside(content, tmp_path, monkeypatch):
    """Return a folder, the current one, with checkpoints in it."""
    monkeypatch.chdir(tmp_path)
    save_file(content, "ep2.pt")
    save_sharded(content, "sharded")
    return tmp_path


@pytest.mark.parametrize("arguments", WRITING)
def test_a_checkpoint_that_is_there_stays_unless_it_may_be_replaced(arguments, run, beside):
    there = beside / arguments[2]
    older = {"w": torch.ones(2)}
    if there.suffix:
        save_file(older, there)
    else:
        save_sharded(older, there)
    code, _, errors = run(*arguments)
    assert code == 1
    assert "--overwrite" in errors
    assert weights_of(there).keys() == {"w"}
    assert run(*arguments, "--overwrite")[0] == 0
    assert "w" not in weights_of(there)


@pytest.mark.parametrize("arguments", WRITING)
def test_a_folder_that_is_no_checkpoint_is_never_replaced(arguments, run, beside):
    there = beside / arguments[2]
    there.mkdir()
    (there / "mine").write_text("precious")
    code, _, errors = run(*arguments, "--overwrite")
    assert code == 1
    assert "mine" in errors or "is a folder" in errors
    assert os.listdir(there) == ["mine"]


def test_what_is_no_part_of_a_checkpoint_stays_in_a_folder_that_is_replaced(run, beside):
    """Notes and results that somebody had put into the folder were gone, with those in folders in it."""
    save_sharded({"w": torch.ones(2)}, "new")
    os.makedirs("new/results")
    mine = {"notes.md": "precious", "results/eval.json": "7", "optimizer.safetensors": "mine, too", "train.py": "code"}
    mine["tokenizer.json"] = "of the model, which the conversion does not write"
    for name, text in mine.items():
        (beside / "new" / name).write_text(text)
    for command in ("convert ep2.pt new --to dcp", "reshard sharded new --world-size 2"):
        assert run(*command.split(), "--overwrite")[0] == 0
        assert {name: (beside / "new" / name).read_text() for name in mine} == mine
        same(weights_of("new"), weights_of("ep2.pt"))
    assert verify("new") is not None
    assert run("convert", "sharded", "new", "--to", "dcp", "--overwrite")[0] == 0
    assert sorted(os.listdir("new")) == sorted(
        [*os.listdir("sharded"), "notes.md", "optimizer.safetensors", "results", "tokenizer.json", "train.py"]
    )


@pytest.mark.parametrize("target", ["out.pt", "out.safetensors", "out --to dcp", "out{rank}.pt --world-size 2"])
def test_weights_that_are_no_numbers_are_named(target, run, tmp_path, monkeypatch):
    """A conversion of a model that had diverged ended with "written", and no word of it."""
    monkeypatch.chdir(tmp_path)
    weights = {f"w{number}": torch.ones(3, 3) for number in range(9)}
    for number in (1, 2, 3, 5, 7, 8):
        weights[f"w{number}"][2, 1] = float("nan")
    weights["w0"][0, 0] = float("inf")  # as a mask has
    save_file({"state": {"model": weights}}, "ep2.pt")
    code, out, _ = run("convert", "ep2.pt", *target.split())
    assert code == 0
    assert "NaN in 6 tensors, written as it is: w1, w2, w3, w5, w7 and 1 more" in out
    save_file({"state": {"model": {"w": torch.full((2,), float("inf"))}}}, "masks.pt")
    assert "NaN" not in run("convert", "masks.pt", "finite.pt")[1]


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_file_that_is_no_checkpoint_is_never_replaced(is_zip, run, beside):
    there = beside / "mine.pt"
    if is_zip:
        with zipfile.ZipFile(there, "w") as archive:
            archive.writestr("thesis.txt", "precious")
    else:
        there.write_text("precious")
    before = there.read_bytes()
    code, _, errors = run("convert", "ep2.pt", "mine.pt", "--to", "pt", "--overwrite")
    assert (code, there.read_bytes()) == (1, before)
    assert "mine.pt is a file that is not a checkpoint" in errors


@pytest.mark.parametrize("left", [b"", b"PK\x03\x04 cut short"], ids=["empty", "cut short"])
def test_what_is_left_of_a_checkpoint_is_replaced(left, run, beside):
    (beside / "new.pt").write_bytes(left)
    assert run("convert", "ep2.pt", "new.pt", "--to", "pt", "--overwrite")[0] == 0
    assert weights_of("new.pt").keys() == weights_of("ep2.pt").keys()


def test_a_link_that_leads_nowhere_is_replaced_and_a_pipe_is_not(run, beside):
    (beside / "new.pt").symlink_to("gone.pt")
    assert run("convert", "ep2.pt", "new.pt", "--to", "pt", "--overwrite")[0] == 0
    assert weights_of("new.pt").keys() == weights_of("ep2.pt").keys()
    os.mkfifo(beside / "pipe.pt")
    code, _, errors = run("convert", "ep2.pt", "pipe.pt", "--to", "pt", "--overwrite")
    assert (code, "not a checkpoint" in errors) == (1, True)


@pytest.mark.parametrize("target", [".", "..", "sharded", "sharded/../sharded"])
def test_what_is_read_and_where_one_stands_is_never_replaced(target, run, beside):
    code, _, errors = run("convert", "sharded", target, "--to", "dcp", "--overwrite")
    assert code == 2
    assert "Choose another name" in errors or "Name a folder of its own" in errors
    assert weights_of("sharded").keys() == weights_of("ep2.pt").keys()


def test_an_empty_folder_is_filled(run, beside):
    (beside / "there").mkdir()
    assert run("convert", "ep2.pt", "there", "--to", "dcp")[0] == 0
    assert weights_of("there").keys() == weights_of("ep2.pt").keys()


@pytest.mark.parametrize("target", ["out.pt", "out.safetensors"])
def test_a_byte_that_has_changed_is_found_before_it_is_copied(target, run, beside):
    with open("ep2.pt", "r+b") as file:
        position = file.read().find(weights_of("ep2.pt")["layer.weight"].numpy().tobytes())
        file.seek(position)
        file.write(b"\xff")
    code, _, errors = run("convert", "ep2.pt", target)
    assert code == 1
    assert "not those that were written" in errors
    assert not os.path.exists(target)
    assert run("convert", "ep2.pt", target, "--no-verify")[0] == 0


@pytest.mark.parametrize("target", ["out.pt", "out.safetensors"])
def test_a_file_that_asks_for_more_than_data_is_read_where_it_is_trusted(target, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weight = torch.randn(3, 2)
    state = {"model": {"weight": weight, "tied": weight}, "train_metrics": Fraction(1, 3)}
    torch.save({"state": state, "rng": [(1, torch.ones(2))]}, "old.pt")
    code, _, errors = run("convert", "old.pt", target)
    assert code == 4
    assert "fractions.Fraction" in errors
    assert not os.path.exists(target)
    assert run("convert", "old.pt", target, "--trust")[0] == 0
    same({"weight": weight, "tied": weight}, weights_of(target))


def test_shards_of_pickles_are_not_taken_for_one_another(run, tmp_path):
    # torch numbers the storages of each file from 0.
    expected = {name: torch.randn(2, 2) for name in ("a", "b", "c")}
    (tmp_path / "hf").mkdir()
    for name, weight in expected.items():
        torch.save({name: weight}, tmp_path / "hf" / f"{name}.bin")
    index = {"weight_map": {name: f"{name}.bin" for name in expected}}
    (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert run("convert", tmp_path / "hf", tmp_path / "out.pt")[0] == 0
    same({f"model.{name}": weight for name, weight in expected.items()}, weights_of(tmp_path / "out.pt"))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_state_becomes_per_rank_files(world_size, content, run, beside):
    more = ["--world-size", world_size, "--resumption", "--optimizer"]
    assert run("convert", "ep2.pt", "cut_{rank}.pt", *more)[0] == 0
    assert sorted(path.name for path in beside.glob("*cut*")) == [f"cut_{rank}.pt" for rank in range(world_size)]
    merged = merge_local(beside / "cut_{rank}.pt")
    same(content["state"]["model"], merged["state"]["model"])
    assert merged["state"]["timestamp"] == content["state"]["timestamp"]
    assert run("diff", "ep2.pt", "cut_{rank}.pt", "--all")[0] == 0


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_in_bytes_and_their_rate_on_terminals_alone(content, run, tmp_path, monkeypatch):
    save_file(content, tmp_path / "ep2.pt")
    shown = {}
    for name, stream, more in (("one", Terminal(), []), ("two", Terminal(), ["--quiet"]), ("three", io.StringIO(), [])):
        monkeypatch.setattr(sys, "stderr", stream)
        assert run("convert", tmp_path / "ep2.pt", tmp_path / f"{name}.pt", *more)[0] == 0
        shown[name] = stream.getvalue()
    assert re.search(r"writing: .*/66\.0.*B/s", shown.pop("one"))
    assert not any(shown.values())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(how, run, tmp_path):
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
        return
    assert [*tmp_path.glob("out.tmp-*")]
    mine, others = tmp_path / "other.tmp-0badcafe-17-1234-01234567", tmp_path / "out.tmp-0badcafe-17-1234-01234567"
    for stays in (mine, others):  # of another name, and of another machine, on which the writer may live
        stays.write_text("half")
    assert run("convert", tmp_path / "big.pt", tmp_path / "out", "--to", "dcp")[0] == 0
    assert {*tmp_path.iterdir()} == {tmp_path / "big.pt", tmp_path / "out", mine, others}
    assert verify(tmp_path / "out") is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "w.pt", "out.pt", "--peft", "merge"], "--peft"),
        (
            ["convert", "w.pt", "out.pt", "--config", "x", "--tokenizer", "x"],
            "--config, --tokenizer does not apply to DST",
        ),
        (["convert", "w.pt", "--composer_path", "other.pt", "--hf_output_path", "out"], "'other.pt' are both given"),
        (["convert", "w.pt", "out.pt", "--include", "nothing*"], "fits none"),
        (["convert", "w.pt", "out.pt", "--exclude", "*"], "leave none"),
        (["convert", "w.pt", ""], "DST=''"),
        (["convert", "", "out.pt"], "'' is not a known kind of checkpoint"),
        (["convert", "missing.pt", "out.pt"], "no checkpoint at 'missing.pt'"),
        (["convert", "w.pt", "out_{rank}.pt"], "--world-size"),
        (["convert", "w.pt", "out.pt", "--world-size", "2"], "--world-size"),
        (["convert", "w.pt", "out.pt", "--to", "local", "--world-size", "2"], "{rank}"),
        (["convert", "w.pt", "out.safetensors", "--optimizer"], "does not apply to DST"),
        (["convert", "empty.pt", "out.pt"], "no weights"),
        (["reshard", "w.pt", "out", "--world-size", "2"], "not cut"),
        (["reshard", "sharded", "out", "--world-size", "2", "--max-shard-size", "1KB"], "--world-size N"),
        (["extract", "w.pt", "out.txt"], ".safetensors, .pt and .json"),
    ],
)
def test_arguments_that_do_not_fit_are_usage_errors(arguments, words, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(2)}, "w.pt")
    save_file({"state": {"run_name": "x"}}, "empty.pt")
    stream_sharded({"w": as_stored(torch.ones(2))}, "sharded", num_files=1)
    code, _, errors = run(*arguments)
    assert code == 2
    assert words in errors
    assert sorted(os.listdir()) == ["empty.pt", "sharded", "w.pt"]


OF_HUGGING_FACE_FOLDERS = [
    ["--config", "config.json"],
    ["--config-override", "vocab_size=7"],
    ["--tokenizer", "."],
    ["--max-shard-size", "5GB"],
    ["--format", "bin"],
    ["--base-model", "base"],
]
WRITTEN_OTHERWISE = [
    ["convert", "hf", "out.pt"],
    ["convert", "hf", "out.safetensors"],
    ["convert", "ep2.pt", "out.safetensors"],
    ["convert", "ep2.pt", "out", "--to", "dcp"],
    ["convert", "ep2.pt", "out_{rank}.pt", "--world-size", "2"],
]


@pytest.fixture
def with_folder(beside, content):
    """Return the current folder, in which `hf` has weights under a Hugging Face folder's names."""
    (beside / "hf").mkdir()
    save_file({"w": torch.ones(2)}, beside / "hf" / "model.safetensors")
    return beside


@pytest.mark.parametrize("option", OF_HUGGING_FACE_FOLDERS, ids=lambda option: option[0])
@pytest.mark.parametrize("arguments", WRITTEN_OTHERWISE, ids=" ".join)
def test_an_option_of_hugging_face_folders_is_refused_where_none_is_written(option, arguments, run, with_folder):
    before = sorted(os.listdir())
    code, _, errors = run(*arguments, *option)
    assert code == 2
    assert f"{option[0]} does not apply to DST" in errors
    assert "Leave it out." in errors
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["hf", "out.pt", "--optimizer", "--resumption"],
            "--optimizer, --resumption does not apply to SRC, which is hf",
        ),
        (["w.safetensors", "out.pt", "--resumption"], "--resumption does not apply to SRC, which is safetensors"),
        (["sharded", "out.pt", "--trust"], "--trust does not apply to SRC, which is dcp"),
        (
            ["ep2.pt", "out.pt", "--deepspeed-weights", "16bit"],
            "--deepspeed-weights does not apply to SRC, which is composer",
        ),
        (["ep2.pt", "out.pt", "--trust-remote-code"], "--trust-remote-code does not apply to composer and pt"),
    ],
)
def test_an_option_of_another_kind_of_source_is_refused(arguments, words, run, with_folder):
    save_file({"w": torch.ones(2)}, "w.safetensors")
    code, _, errors = run("convert", *arguments)
    assert code == 2
    assert words in errors
    assert "Leave " in errors
    assert not os.path.exists("out.pt")


def test_options_that_apply_to_a_hugging_face_folder_that_is_read_are_kept(run, with_folder):
    more = ["--trust-remote-code", "--output-precision", "bf16", "--rename", "w=v"]
    assert run("convert", "hf", "out.pt", *more)[0] == 0
    assert weights_of("out.pt")["model.v"].dtype == torch.bfloat16


def test_a_name_with_any_ending_is_a_folder_unless_its_format_is_given(content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    for folder in ("out", "llama-3.1-8b", ".hidden", "o.xyz"):
        assert "--config" in run("convert", tmp_path / "ep2.pt", f"{tmp_path}/{folder}")[2]
    assert run("convert", tmp_path / "ep2.pt", tmp_path / "o.xyz", "--to", "dcp")[0] == 0
    assert run("convert", tmp_path / "ep2.pt", tmp_path / "p.xyz", "--to", "pt")[0] == 0
    same(content["state"]["model"], weights_of(tmp_path / "p.xyz"))


def test_older_spellings_of_options_are_accepted_and_not_in_the_help(run, tmp_path):
    torch.save({"state": {"model": {"weight": torch.ones(2)}}}, tmp_path / "w.pt")
    assert run("convert", tmp_path / "w.pt", tmp_path / "out.pt", "--output_precision", "bf16")[0] == 0
    assert torch.load(tmp_path / "out.pt")["state"]["model"]["weight"].dtype == torch.bfloat16
    _, help_text, _ = run("convert", "--help")
    assert "--output-precision" in help_text
    assert "_precision" not in help_text
