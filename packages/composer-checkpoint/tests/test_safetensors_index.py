"""Weights in several safetensors files with an index."""

import json
import os
import shutil
import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file as load_with_safetensors
from safetensors.torch import save_file as save_with_safetensors

from composer_checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    UnsafeCheckpointError,
    load_file,
    read_manifest,
    save_file,
    verify,
)
from composer_checkpoint.files import save_weights_in_shards
from composer_checkpoint.modular import CheckpointLoadOptions, load_model_checkpoint, save_model_to_disk

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def weights():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, generator=generator) for name in ("a", "b", "c")}


@pytest.fixture
def foreign(tmp_path):
    """Write what another program writes: two files and their index."""
    a, b, c = weights().values()
    save_with_safetensors({"a": a, "b": b}, tmp_path / FIRST)
    save_with_safetensors({"c": c}, tmp_path / SECOND)
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return tmp_path / INDEX


@pytest.fixture
def own(tmp_path):
    return save_weights_in_shards(weights(), tmp_path / "own", max_shard_bytes=64, info={"run_name": "plum"})


def write_index(folder, weight_map):
    text = json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map})
    (folder / INDEX).write_text(text)


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_files_of_another_program_are_read(foreign, caplog):
    check_equal(load_file(foreign), weights())
    assert "is unverified" in caplog.text


def test_files_are_no_larger_than_asked_for_and_others_read_them(own):
    assert sorted(os.listdir(own.parent)) == [FIRST, SECOND, INDEX]
    index = json.loads(own.read_text())
    assert index["metadata"]["total_size"] == 3 * 8 * 4
    found = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors = load_with_safetensors(own.parent / shard)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 64
        assert {index["weight_map"][name] for name in tensors} == {shard}
        found |= tensors
    check_equal(found, weights())


def test_what_was_written_is_read_and_verified(own):
    check_equal(load_file(own), weights())
    assert verify(own) == read_manifest(own)
    assert read_manifest(own).info["run_name"] == "plum"
    assert read_manifest(own).tensors.keys() == weights().keys()


def test_weights_that_fit_become_one_file_without_an_index(tmp_path):
    path = save_weights_in_shards(weights(), tmp_path / "own", max_shard_bytes=96)
    assert os.listdir(tmp_path / "own") == ["model.safetensors"]
    check_equal(load_file(path), weights())


def test_a_tensor_that_is_larger_than_a_file_may_be_gets_a_file_of_its_own(tmp_path):
    path = save_weights_in_shards(weights(), tmp_path / "own", max_shard_bytes=1)
    assert len(list((tmp_path / "own").glob("*.safetensors"))) == 3
    check_equal(load_file(path), weights())


def test_names_of_one_tensor_share_a_file_that_has_it_once(tmp_path):
    tied = weights() | {"z": torch.zeros(0)}
    tied["tied"] = tied["a"]
    path = save_weights_in_shards(tied, tmp_path / "own", max_shard_bytes=32)
    assert sum(file.stat().st_size for file in (tmp_path / "own").glob("*.safetensors")) < 4 * 4096
    loaded = load_file(path)
    check_equal(loaded, tied)
    assert loaded["tied"].data_ptr() == loaded["a"].data_ptr()


@pytest.mark.parametrize(
    "shard",
    ["../model-00002-of-00002.safetensors", "/etc/model.safetensors", "x/../../m.safetensors", "..\\m.safetensors"],
)
def test_a_file_outside_the_folder_is_refused_by_name(foreign, shard):
    write_index(foreign.parent, {"a": FIRST, "b": FIRST, "c": shard})
    with pytest.raises(UnsafeCheckpointError, match=r"'c' is in .*, which is outside its folder"):
        load_file(foreign)


@pytest.mark.parametrize("shard", ["model.bin", ".safetensors.index.json", 3, None, ["model.safetensors"], ".."])
def test_what_is_no_safetensors_file_is_refused(foreign, shard):
    write_index(foreign.parent, {"a": FIRST, "b": FIRST, "c": shard})
    with pytest.raises(CorruptCheckpointError, match=r"which is no \.safetensors file"):
        load_file(foreign)


def test_a_missing_file_is_named_with_its_tensors(foreign):
    (foreign.parent / SECOND).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"lacks the shard {SECOND}, in which .* 1 tensors \(c\)"):
        load_file(foreign)


def test_a_tensor_in_two_files_is_named(foreign):
    save_with_safetensors({"a": torch.zeros(8), "c": weights()["c"]}, foreign.parent / SECOND)
    with pytest.raises(CorruptCheckpointError, match=rf"'a' is in two shards, {FIRST} and {SECOND}"):
        load_file(foreign)


def test_a_tensor_that_the_index_has_twice_is_named(foreign):
    foreign.write_text(f'{{"weight_map": {{"a": "{FIRST}", "b": "{FIRST}", "c": "{SECOND}", "a": "{SECOND}"}}}}')
    with pytest.raises(CorruptCheckpointError, match="'a' occurs twice"):
        load_file(foreign)


@pytest.mark.parametrize("weight_map", [{"a": FIRST, "c": SECOND}, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}])
def test_an_index_that_lists_other_tensors_than_there_are_is_refused(foreign, weight_map):
    write_index(foreign.parent, weight_map)
    with pytest.raises(CorruptCheckpointError, match=r"holds other tensors than it says: [bd] is in one of them only"):
        load_file(foreign)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\xff"])
def test_what_is_no_index_is_refused(foreign, text):
    foreign.write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError):
        load_file(foreign)


def test_no_index_is_no_checkpoint(tmp_path):
    with pytest.raises(NoCheckpointError):
        load_file(tmp_path / INDEX)


def test_a_file_of_another_save_is_refused_by_name(own, tmp_path):
    later = {name: tensor + 1 for name, tensor in weights().items()}
    other = save_weights_in_shards(later, tmp_path / "other", max_shard_bytes=64)
    os.replace(other.parent / SECOND, own.parent / SECOND)
    for check in (load_file, verify):
        with pytest.raises(CorruptCheckpointError, match=rf"{SECOND} is not what was written together with"):
            check(own)


@pytest.mark.parametrize("swapped", [FIRST, SECOND])
def test_a_file_that_is_replaced_after_all_were_compared_is_not_loaded(own, tmp_path, monkeypatch, swapped):
    later = {name: tensor + 1 for name, tensor in weights().items()}
    other = save_weights_in_shards(later, tmp_path / "other", max_shard_bytes=64)
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "checks_of_mine.check")
    checks = ModuleType("checks_of_mine")  # is asked right before each file is loaded

    def swap(path, specs):
        if os.path.basename(path) == swapped:
            shutil.copy(other.parent / swapped, own.parent / swapped)
        return True

    checks.check = swap
    monkeypatch.setitem(sys.modules, "checks_of_mine", checks)
    with pytest.raises(CorruptCheckpointError, match=rf"{swapped} is not what was written together with"):
        load_file(own)


@pytest.mark.parametrize("alias", ["c", "elsewhere"])
def test_another_name_in_one_file_does_not_hide_a_tensor_of_another(own, alias):
    """As a hostile file may say whose seal is right."""
    shard = own.parent / FIRST
    tied = save_file({"a": weights()["a"], "b": weights()["b"]}, shard, info={"aliases": {alias: "a"}})
    index = json.loads(own.read_text())
    del index["metadata"]["composer_manifest"]
    own.write_text(json.dumps(index))
    assert tied.tensors.keys() == {"a", "b"}
    if alias == "c":
        with pytest.raises(CorruptCheckpointError, match="'c' is in two shards"):
            load_file(own)
    else:
        assert torch.equal(load_file(own)["elsewhere"], weights()["a"])


def test_no_flipped_byte_of_the_index_changes_what_is_loaded(own):
    data = own.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        own.write_bytes(flipped)
        try:
            loaded = load_file(own)
        except CheckpointError:
            continue
        check_equal(loaded, weights())


@pytest.mark.parametrize("max_shard_bytes", [1, 1 << 20])
def test_a_model_is_saved_in_several_files_and_loaded_from_its_folder(tmp_path, max_shard_bytes):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = save_model_to_disk(model, tmp_path, save_format="safetensors", max_shard_bytes=max_shard_bytes)
    assert os.path.exists(path)
    for source in (path, tmp_path / "model"):
        torch.nn.init.zeros_(other.weight)
        load_model_checkpoint(other, source, CheckpointLoadOptions())
        assert torch.equal(other.weight, model.weight)
    with pytest.raises(ValueError, match="already exists"):
        save_model_to_disk(model, tmp_path, save_format="safetensors", max_shard_bytes=max_shard_bytes)
    save_model_to_disk(model, tmp_path, save_format="safetensors", max_shard_bytes=1 << 21, overwrite=True)
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]


def test_a_limit_for_another_format_and_one_of_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="max_shard_bytes=10 is for save_format='safetensors'"):
        save_model_to_disk(torch.nn.Linear(3, 2), tmp_path, max_shard_bytes=10)
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        save_weights_in_shards(weights(), tmp_path / "x", max_shard_bytes=0)
