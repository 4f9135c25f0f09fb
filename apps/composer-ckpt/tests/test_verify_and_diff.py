"""`verify` notices damage, `diff` says where two checkpoints part."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from composer_checkpoint import save_file, save_sharded
from composer_checkpoint.files import save_weights_in_shards
from composer_checkpoint.formats.per_rank import save_local


def save_shards(content, path):
    save_weights_in_shards({"a": torch.ones(4), "b": torch.zeros(4)}, path, max_shard_bytes=16)


def save_with_torch(content, path):
    torch.save(content["state"]["model"], path)


@pytest.mark.parametrize("save", [save_file, save_sharded, save_shards, save_with_torch])
def test_what_was_saved_is_whole(save, content, run_json, tmp_path):
    save(content, tmp_path / "saved")
    code, told = run_json("verify", tmp_path / "saved", "--hash")
    assert code == 0
    assert told["ok"]
    assert all(check["ok"] for check in told["checks"])
    assert told["hashes"]


@pytest.mark.parametrize("save", [save_file, save_sharded, save_shards, save_with_torch])
def test_one_flipped_bit_is_noticed(save, content, run_json, tmp_path):
    save(content, tmp_path / "saved")
    damaged = tmp_path / "saved"
    if damaged.is_dir():
        damaged = max(damaged.glob("*[0-9]*.*"), key=lambda path: path.stat().st_size)
    needle = (
        torch.ones(4).numpy().tobytes()
        if save is save_shards
        else content["state"]["model"]["layer.weight"].numpy().tobytes()
    )
    if save is save_shards:
        damaged = next(path for path in damaged.parent.glob("*.safetensors") if needle in path.read_bytes())
    data = bytearray(damaged.read_bytes())
    data[data.index(needle)] ^= 1
    damaged.write_bytes(data)
    code, told = run_json("verify", tmp_path / "saved")
    assert code == 1
    assert not told["ok"]


def test_a_missing_shard_and_a_missing_tensor_are_named(content, run_json, tmp_path):
    save_shards(content, tmp_path / "saved")
    index = tmp_path / "saved" / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    del raw["metadata"]["composer_manifest"]
    raw["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(raw))
    code, told = run_json("verify", tmp_path / "saved")
    assert code == 1
    assert any("c" in check["detail"] for check in told["checks"] if not check["ok"])
    (tmp_path / "saved" / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002" in json.dumps(run_json("verify", tmp_path / "saved")[1])


def test_numbers_that_are_not_finite_are_pointed_out(run, tmp_path):
    save_file({"mask": torch.tensor([0.0, float("-inf")]), "weight": torch.ones(2)}, tmp_path / "w.pt")
    code, text, _ = run("verify", tmp_path / "w.pt")
    assert code == 0
    assert "\n  note finite: NaN or infinite numbers in 1 tensor: mask\n" in text
    save_file({"weight": torch.ones(2)}, tmp_path / "fine.pt")
    assert "\n  ok   finite: all are finite\n" in run("verify", tmp_path / "fine.pt")[1]


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_path_without_a_checkpoint_is_a_mistake_in_the_command(command, run, tmp_path):
    code, _, errors = run(command, tmp_path / "nothing")
    assert (code, errors) == (
        2,
        f"composer-ckpt: there is no checkpoint at '{tmp_path / 'nothing'}'. Check the path.\n",
    )


def test_what_an_interrupted_save_left_is_no_mistake_in_the_command(run, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "__0_0.distcp").write_bytes(b"half")
    assert run("verify", tmp_path / "saved")[0] == 1


def test_a_file_that_asks_for_more_than_data_is_refused_rather_than_damaged(run, tmp_path):
    torch.save({"odd": print}, tmp_path / "odd.pt")
    code, text, _ = run("verify", tmp_path / "odd.pt")
    assert code == 4
    assert text.startswith(f"{tmp_path / 'odd.pt'}: refused (")


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path):
    save_file({"gewicht_ß": torch.ones(2)}, tmp_path / "w.pt")
    command = [sys.executable, "-m", "composer_ckpt", "inspect", str(tmp_path / "w.pt")]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"gewicht_\\xdf" in done.stdout


def test_a_second_name_of_a_tied_weight_is_no_difference(run_json, tmp_path):
    weight = torch.ones(3, 2)
    save_file({"state": {"model": {"model.wte": weight, "model.lm_head": weight}}}, tmp_path / "tied.pt")
    save_weights_in_shards({"wte": weight}, tmp_path / "hf", max_shard_bytes=99)
    code, told = run_json("diff", tmp_path / "tied.pt", tmp_path / "hf")
    assert (code, told["only_a"], told["only_b"]) == (0, [], [])
    assert run_json("diff", tmp_path / "hf", tmp_path / "tied.pt")[0] == 0
    apart = {"model.wte": weight, "model.lm_head": weight.clone()}
    save_file({"state": {"model": apart}}, tmp_path / "apart.pt")
    code, told = run_json("diff", tmp_path / "apart.pt", tmp_path / "hf")
    assert (code, told["only_a"]) == (1, ["lm_head"])


def test_formats_differ_and_tensors_do_not(content, run_json, tmp_path):
    save_file(content, tmp_path / "a.pt")
    save_sharded(content, tmp_path / "b")
    save_local(content, tmp_path / "c_{rank}.pt")
    for other in ("b", "c_{rank}.pt"):
        code, told = run_json("diff", tmp_path / "a.pt", tmp_path / other)
        assert code == 0
        assert told["equal"]


def test_the_first_and_the_largest_difference_are_named(content, run_json, tmp_path):
    save_file(content, tmp_path / "a.pt")
    weights = content["state"]["model"]
    weights["half"] = weights["half"] + 1
    changed = weights["layer.weight"].clone()
    changed[1, 2] += 0.5
    weights["layer.weight"] = changed
    content["state"]["timestamp"]["Timestamp"]["batch"] = 21
    save_file(content, tmp_path / "b.pt")
    code, told = run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1
    assert told["first_divergent"] == "layer.weight"
    largest = {item["name"]: item["max_abs"] for item in told["value"]}
    assert largest["layer.weight"] == pytest.approx(0.5, abs=1e-6)  # one rounding of float32
    assert largest["half"] == pytest.approx(1.0, abs=2**-6)  # one rounding of bfloat16 below 4
    assert told["timestamp"] == {"batch": [20, 21]}


def test_a_tolerance_lets_small_differences_pass(run_json, tmp_path):
    save_file({"w": torch.tensor([1.0, 2.0])}, tmp_path / "a.pt")
    save_file({"w": torch.tensor([1.0, 2.001])}, tmp_path / "b.pt")
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 1
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--atol", "0.01")[0] == 0


def test_missing_tensors_shapes_and_dtypes_are_told_apart(run_json, tmp_path):
    save_file({"x": torch.ones(2), "s": torch.ones(2), "d": torch.ones(2)}, tmp_path / "a.pt")
    save_file({"y": torch.ones(2), "s": torch.ones(3), "d": torch.ones(2).double()}, tmp_path / "b.pt")
    code, told = run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1
    assert (told["only_a"], told["only_b"]) == (["x"], ["y"])
    assert told["shape"] == [{"name": "s", "a": [2], "b": [3]}]
    assert told["dtype"] == [{"name": "d", "a": "float32", "b": "float64"}]
    assert told["value"] == []


def test_nan_is_equal_to_itself_and_to_nothing_else(run_json, tmp_path):
    save_file({"w": torch.tensor([float("nan"), 1.0])}, tmp_path / "a.pt")
    save_file({"w": torch.tensor([2.0, 1.0])}, tmp_path / "b.pt")
    shutil.copyfile(tmp_path / "a.pt", tmp_path / "c.pt")
    assert run_json("diff", tmp_path / "a.pt", tmp_path / "c.pt")[0] == 0
    code, told = run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1
    assert told["value"][0]["max_abs"] is None
    save_file({"w": torch.tensor([float("nan"), 1.5])}, tmp_path / "d.pt")
    _, told = run_json("diff", tmp_path / "a.pt", tmp_path / "d.pt")
    assert told["value"][0]["max_abs"] == 0.5  # NaN in both files at one place is equal


def test_names_of_tensors_neither_steer_the_terminal_nor_forge_lines(run, tmp_path):
    bad = {"a\n  ok   hashes: \x1b[31mforged\x9b": torch.ones(1)}
    save_file(bad, tmp_path / "bad.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "good.safetensors")
    for arguments in (
        ("inspect", tmp_path / "bad.safetensors"),
        ("verify", "--hash", tmp_path / "bad.safetensors"),
        ("diff", tmp_path / "bad.safetensors", tmp_path / "good.safetensors"),
    ):
        _, out, err = run(*arguments)
        assert r"a\n" in out
        assert r"\x1b[31mforged\x9b" in out
        assert not any(line.startswith("  ok   hashes: \\x1b") for line in out.splitlines())
        assert (out + err).replace("\n", "").isprintable()


def test_a_flipped_bit_is_noticed_without_a_manifest_too(content, run_json, tmp_path):
    save_sharded(content, tmp_path / "saved")
    (tmp_path / "saved" / "composer_manifest.json").unlink()
    shard = tmp_path / "saved" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[data.index(content["state"]["model"]["layer.weight"].numpy().tobytes())] ^= 1
    assert run_json("verify", tmp_path / "saved")[0] == 0
    shard.write_bytes(data)
    assert run_json("verify", tmp_path / "saved")[0] == 1
