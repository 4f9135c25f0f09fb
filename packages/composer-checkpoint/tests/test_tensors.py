"""Checkpoints of all formats are read and written tensor by tensor, as they are read and written whole."""

import datetime
import os
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from composer_checkpoint import (
    CorruptCheckpointError,
    NoCheckpointError,
    UnsafeCheckpointError,
    load_file,
    remove_leftovers,
    replace_pointer,
    save_file,
    save_sharded,
    verify,
)
from composer_checkpoint.formats.per_rank import merge_local, save_local
from composer_checkpoint.tensors import (
    aliases_of,
    as_stored,
    find_kind,
    open_checkpoint,
    plan_shards,
    stream_local,
    stream_pt,
    stream_safetensors,
    stream_sharded,
    stream_shards,
)


@pytest.fixture
def state():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(5, 3, generator=generator)
    model = {
        "first": weight,
        "tied": weight,
        "turned": torch.randn(3, 4, generator=generator).t(),
        "slice": torch.randn(6, 4, generator=generator)[1:4, ::2],
        "empty": torch.empty(0, 3),
        "half": torch.randn(4, generator=generator).bfloat16(),
        "eighth": torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "number": torch.tensor(3),
    }
    timestamp = {"Timestamp": {"epoch": 1, "total_wct": datetime.timedelta(seconds=1.5)}}
    rng = [{"torch": torch.arange(4, dtype=torch.uint8), "numpy": np.arange(3)} for _ in range(3)]
    return {"state": {"model": model, "timestamp": timestamp}, "rng": rng}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def save_legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


SAVERS = {
    "a.pt": save_file,
    "b.pt": torch.save,
    "c.pt": save_legacy,
    "d.pt.gz": save_file,
    "e.tar": save_file,
    "f.safetensors": save_file,
    "g_{rank}.pt": save_local,
    "h": save_sharded,
}


@pytest.mark.parametrize("name", SAVERS)
def test_each_format_is_read_tensor_by_tensor(name, state, tmp_path):
    SAVERS[name](state, tmp_path / name)
    with open_checkpoint(tmp_path / name) as source:
        same({key: tensor.read() for key, tensor in source.weights.items()}, state["state"]["model"])
        if name != "h":  # where each name has its own bytes
            assert source.aliases == {"tied": "first"}
        pieces = {
            key: torch.cat([t.read_range(i, 1) for i in range(t.numel)]).reshape(t.shape)
            for key, t in source.weights.items()
            if t.numel
        }
        same(pieces, {key: tensor for key, tensor in state["state"]["model"].items() if tensor.numel()})
        if not name.endswith(".safetensors"):
            assert source.state["timestamp"] == state["state"]["timestamp"]


def test_a_written_pt_file_is_what_torch_and_this_package_read(state, tmp_path):
    save_file(state, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as source:
        manifest = stream_pt(source.tree, tmp_path / "b.pt", info={"run_name": "x"})
    assert verify(tmp_path / "b.pt") == manifest
    assert zipfile.ZipFile(tmp_path / "b.pt").testzip() is None
    loaded = load_file(tmp_path / "b.pt")
    same(loaded["state"]["model"], state["state"]["model"])
    assert loaded["state"]["timestamp"] == state["state"]["timestamp"]
    assert np.array_equal(loaded["rng"][2]["numpy"], np.arange(3))
    plain = torch.load(tmp_path / "b.pt", weights_only=True, mmap=True)["state"]["model"]
    same(plain, state["state"]["model"])
    assert plain["first"].data_ptr() == plain["tied"].data_ptr()


@pytest.mark.parametrize("num_files", [1, 2, 7])
def test_a_written_folder_is_cut_for_as_many_ranks(num_files, state, tmp_path):
    stream_sharded(stored(state), tmp_path / "out", num_files=num_files)
    assert verify(tmp_path / "out") is not None
    assert len([*(tmp_path / "out").glob("*.distcp")]) <= num_files
    with open_checkpoint(tmp_path / "out") as source:
        same({key: tensor.read() for key, tensor in source.weights.items()}, state["state"]["model"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_written_per_rank_files_are_merged_to_the_same(world_size, state, tmp_path):
    stream_local(stored(state), tmp_path / "r{rank}.pt", world_size=world_size)
    assert len(os.listdir(tmp_path)) == world_size
    same(merge_local(tmp_path / "r{rank}.pt")["state"]["model"], state["state"]["model"])


def stored(state):
    model = {name: as_stored(tensor) for name, tensor in state["state"]["model"].items()}
    return {"state": {**state["state"], "model": model}, "rng": state["rng"]}


def test_a_written_safetensors_file_gives_back_its_aliases(tmp_path):
    tensors = {"a": as_stored(torch.ones(2)), "b": as_stored(torch.arange(3))}
    stream_safetensors(tensors, tmp_path / "w.safetensors", aliases={"c": "a"})
    assert verify(tmp_path / "w.safetensors") is not None
    found = load_file(tmp_path / "w.safetensors")
    same(found, {"a": torch.ones(2), "b": torch.arange(3), "c": torch.ones(2)})


def test_shards_are_filled_in_order_and_a_large_tensor_is_alone(tmp_path):
    tensors = {name: as_stored(torch.full((count,), 1.0)) for name, count in (("a", 2), ("b", 2), ("c", 9), ("d", 1))}
    shards = plan_shards(tensors, 16)
    assert [list(group) for group in shards.values()] == [["a", "b"], ["c"], ["d"]]
    stream_shards(shards, tmp_path)
    with open_checkpoint(tmp_path) as source:
        assert (source.format, list(source.weights)) == ("hf", ["a", "b", "c", "d"])
    same(
        load_file(tmp_path / "model.safetensors.index.json"), {name: tensor.read() for name, tensor in tensors.items()}
    )


def test_progress_counts_each_byte_once(state, tmp_path):
    done = []
    tree = stored(state)
    stream_sharded(tree["state"]["model"], tmp_path / "out", num_files=2, progress=done.append)
    assert sum(done) == sum(tensor.size_bytes for tensor in tree["state"]["model"].values())


def test_a_cast_comes_straight_from_what_is_stored():
    exact = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    assert torch.equal(as_stored(exact).to(torch.bfloat16).read(), exact.to(torch.bfloat16))
    assert torch.equal(as_stored(exact).to(torch.bfloat16).read_range(1, 1), exact[1:].to(torch.bfloat16))


def test_equal_tensors_are_no_aliases_unless_they_are_one():
    one = torch.ones(2)
    tensors = {"a": as_stored(one), "b": as_stored(one), "c": as_stored(torch.ones(2))}
    assert aliases_of(tensors) == {"b": "a"}


@pytest.mark.parametrize("name", ["latest.pt", "latest"])
def test_a_pointer_leads_to_its_checkpoint(name, state, tmp_path):
    save_file(state, tmp_path / "ep1.pt")
    replace_pointer(tmp_path / name, tmp_path / "ep1.pt")
    with open_checkpoint(tmp_path / name) as source:
        assert source.format == "composer"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def test_what_asks_for_code_is_opened_to_be_looked_at_only_on_request(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "evil": Evil()}, "evil.pt")
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        open_checkpoint("evil.pt")
    with open_checkpoint("evil.pt", record_unknown=True) as source:
        assert source.unsafe_globals == (f"{os.mkdir.__module__}.mkdir",)
        assert torch.equal(source.tensors["w"].read(), torch.ones(2))
    assert not os.path.exists("owned")


def test_what_cannot_be_loaded_without_trust_is_not_written(tmp_path):
    with pytest.raises(UnsafeCheckpointError):
        stream_pt({"w": torch.ones(1), "evil": Evil()}, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_tampered_index_of_a_folder_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "../evil.bin"}}')
    with pytest.raises(UnsafeCheckpointError, match="outside its folder"):
        open_checkpoint(tmp_path)


def test_the_file_of_a_rank_that_is_missing_is_named(state, tmp_path):
    stream_local(stored(state), tmp_path / "r{rank}.pt", world_size=3)
    (tmp_path / "r1.pt").unlink()
    with pytest.raises(NoCheckpointError, match=r"r1\.pt"):
        open_checkpoint(tmp_path / "r{rank}.pt")


def test_files_of_two_saves_are_not_mixed(state, tmp_path):
    stream_local(stored(state), tmp_path / "r{rank}.pt", world_size=2)
    stream_local(stored(state), tmp_path / "other{rank}.pt", world_size=2)
    os.replace(tmp_path / "other1.pt", tmp_path / "r1.pt")
    with pytest.raises(CorruptCheckpointError, match="different saves"):
        open_checkpoint(tmp_path / "r{rank}.pt")


REPLACE_AND_DIE = """
import os, sys, torch
from composer_checkpoint.formats import per_rank
from composer_checkpoint.tensors import as_stored

renames, rename = [], per_rank.put_in_place
def rename_or_die(*args, **kwargs):
    if len(renames) == 1:
        os._exit(9)
    renames.append(rename(*args, **kwargs))
per_rank.put_in_place = rename_or_die
per_rank.stream_local({"w": as_stored(torch.ones(4))}, sys.argv[1], world_size=2, overwrite=True)
"""


def test_a_replacement_that_is_killed_between_two_ranks_files_is_completed(tmp_path):
    """A conversion that was killed left files of two saves, which nothing could load any more."""
    path = f"{tmp_path}/r{{rank}}.pt"
    stream_local({"w": as_stored(torch.zeros(4))}, path, world_size=2)
    assert subprocess.run([sys.executable, "-c", REPLACE_AND_DIE, path]).returncode == 9
    remove_leftovers(tmp_path, locked=True)
    with open_checkpoint(path) as source:
        assert source.weights["w"].read().tolist() == [1] * 4


def test_a_folder_that_is_no_checkpoint_is_told_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(NoCheckpointError, match=r"\.metadata.*notes\.txt"):
        find_kind(tmp_path)


def test_pickled_arrays_are_read(tmp_path):
    (tmp_path / "w.pkl").write_bytes(pickle.dumps({"count": 3}))
    with open_checkpoint(tmp_path / "w.pkl") as source:
        assert source.tree == {"count": 3}
