"""In flat formats, nested keys are joined, and no two tensors get one name."""

from datetime import timedelta

import numpy as np
import pytest
import torch

from composer_checkpoint import IncompatibleCheckpointError, inspect_file, load_file, save_file, save_sharded
from composer_checkpoint._tree import map_tree
from composer_checkpoint.async_save import AsyncSaver
from composer_checkpoint.files import save_weights_in_shards
from composer_checkpoint.formats.per_rank import load_local, merge_local, save_local
from composer_checkpoint.sharded import load_sharded
from composer_checkpoint.tensors import (
    as_stored,
    open_checkpoint,
    stream_local,
    stream_pt,
    stream_safetensors,
    stream_sharded,
)
from composer_dist.testing import run_ranks

ONE, TWO = torch.full((2,), 1.0), torch.full((2,), 2.0)
DOTTED = {
    "nested and flat": {"a": {"c": ONE}, "a.c": TWO},
    "halves": {"a": {"b": {"c": ONE}}, "a.b": {"c": TWO}},
    "number and text": {1: ONE, "1": TWO},
    "in a list": {"a": [ONE], "a.0": TWO},
}


@pytest.mark.parametrize("tree", DOTTED.values(), ids=DOTTED.keys())
def test_weights_of_one_name_are_refused_with_both_places(tree, tmp_path):
    torch.save(tree, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as source:
        assert len(source.tensors) == 2  # which can be looked at all the same
        with pytest.raises(IncompatibleCheckpointError, match=r"\['?\w[^ ]*\] and \[.*\] would both be called '.*' in"):
            _ = source.weights


def test_the_places_are_told_as_python_has_them(tmp_path):
    torch.save({"model": DOTTED["nested and flat"]}, tmp_path / "a.pt")
    with (
        open_checkpoint(tmp_path / "a.pt") as source,
        pytest.raises(IncompatibleCheckpointError, match=r"^\['a'\]\['c'\] and \['a\.c'\] would both be called 'a\.c'"),
    ):
        _ = source.weights


def test_one_tensor_may_have_its_name_twice(tmp_path):
    torch.save({"a": {"c": ONE}, "a.c": ONE}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as source:
        assert list(source.weights) == ["a.c"]


def test_slashes_in_keys_stay_and_shared_containers_are_in_each_place(tmp_path):
    layer = {"w/x": ONE}
    torch.save({"one": layer, "two": layer}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as source:
        assert list(source.weights) == ["one.w/x", "two.w/x"]
        assert source.aliases == {"two.w/x": "one.w/x"}


def test_numbers_after_names_are_no_names_that_are_there(tmp_path):
    save_file({"a": {1: ONE, "1": TWO, "1#1": torch.zeros(2)}}, tmp_path / "a.pt")
    assert [each.shape for each in inspect_file(tmp_path / "a.pt").tensors.values()] == [(2,)] * 3
    with open_checkpoint(tmp_path / "a.pt") as source:
        assert sorted(float(tensor.read()[0]) for tensor in source.tensors.values()) == [0, 1, 2]


def test_the_parts_of_a_sparse_tensor_hide_no_tensor(tmp_path):
    manifest = save_file({"adj": torch.eye(2).to_sparse(), "adj/indices": ONE}, tmp_path / "a.pt")
    assert len(manifest.tensors) == 3
    assert manifest.tensors["adj/indices"].shape == (2,)
    found = inspect_file(tmp_path / "a.pt").tensors
    assert {name: each.layout for name, each in found.items()} == {"adj": "sparse_coo", "adj/indices": "strided"}


def test_what_was_an_array_is_one_and_nothing_else_of_that_name(tmp_path):
    save_file({"x": {"y": np.ones(2)}, "x/y": ONE, 1: np.ones(2), "1": ONE, "~2": ONE}, tmp_path / "a.pt")
    found = load_file(tmp_path / "a.pt")
    assert [type(each) for each in (found["x"]["y"], found[1])] == [np.ndarray] * 2
    assert [type(found[key]) for key in ("x/y", "1", "~2")] == [torch.Tensor] * 3
    with open_checkpoint(tmp_path / "a.pt") as source:
        assert list(source.tensors) == ["x/y", "1", "~2"]


@pytest.mark.parametrize("tree", [*DOTTED.values(), {"a": {"c": {}}, "a.c": ONE}])
def test_a_sharded_checkpoint_is_not_begun(tree, tmp_path):
    with pytest.raises(IncompatibleCheckpointError, match=r"would both be called .* in a sharded checkpoint"):
        save_sharded(tree, tmp_path / "ep1")
    with pytest.raises(IncompatibleCheckpointError, match=r"would both be called .* in a sharded checkpoint"):
        stream_sharded(tree, tmp_path / "ep1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tree", DOTTED.values(), ids=DOTTED.keys())
def test_nothing_is_loaded_into_two_tensors_of_one_name(tree, tmp_path):
    save_sharded({"a.c": ONE}, tmp_path / "ep1")
    with pytest.raises(IncompatibleCheckpointError, match=r"would both be called .* in a sharded checkpoint"):
        load_sharded(dict(tree), tmp_path / "ep1")


def save_unlike(folder):
    import torch.distributed as tdist

    state = {"a": {"c": ONE}} if tdist.get_rank() == 0 else {"a.c": TWO}
    with pytest.raises(IncompatibleCheckpointError) as caught:
        save_sharded(state, folder)
    return str(caught.value)


def test_ranks_do_not_lose_each_others_entries(tmp_path):
    told = run_ranks(save_unlike, tmp_path / "ep1", store=tmp_path / "store")
    assert told[0] == told[1]
    assert told[0].startswith("['a']['c'] on rank 0 and ['a.c'] on rank 1 would both be called 'a.c'")
    assert not (tmp_path / "ep1").exists()


@pytest.mark.parametrize("tree", [{"x": {"y": ONE}, "x/y": TWO}, {1: ONE, "1": TWO}, {"x": {"y": 5}, "x/y": ONE}])
def test_per_rank_files_are_not_begun_where_a_tensor_to_cut_has_the_name_of_another_thing(tree, tmp_path):
    with pytest.raises(IncompatibleCheckpointError, match=r"would both be called .* in the layout of per-rank files"):
        stream_local(tree, tmp_path / "rank{rank}.pt", world_size=2)
    told = run_ranks(save_sharded_beside, tmp_path / "rank{rank}.pt", store=tmp_path / "store")
    assert told[0] == told[1]
    assert told[0].startswith("['x']['y'] and ['x/y'] would both be called 'x/y' in the layout of per-rank files.")
    assert not list(tmp_path.glob("*.pt"))


def save_sharded_beside(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.arange(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(IncompatibleCheckpointError) as caught:
        save_local({"x": {"y": tensor}, "x/y": 3}, path)
    return str(caught.value)


@pytest.mark.parametrize("tree", [{"x": {"y": ONE}, "x/y": TWO}, {1: ONE, "1": TWO}, {"x": {"y": 5}, "x/y": 6}])
def test_what_every_rank_has_whole_needs_no_name_of_its_own_in_per_rank_files(tree, tmp_path):
    save_local(tree, tmp_path / "rank{rank}.pt")
    found = map_tree(tree, lambda _, value: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value)
    load_local(found, tmp_path / "rank{rank}.pt")
    merged = merge_local(tmp_path / "rank{rank}.pt")
    for got in (found, merged):
        assert str(got) == str(tree)


def save_a_container_twice(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    layer = {"w": distribute_tensor(torch.arange(4), init_device_mesh("cpu", (2,)), [Shard(0)])}
    save_local({"one": layer, "two": layer}, path)


def test_a_container_in_two_places_of_per_rank_files_is_whole_in_both(tmp_path):
    run_ranks(save_a_container_twice, tmp_path / "{rank}.pt", store=tmp_path / "store")
    found = merge_local(tmp_path / "{rank}.pt")
    assert torch.equal(found["one"]["w"], torch.arange(4))
    assert torch.equal(found["two"]["w"], torch.arange(4))


@pytest.mark.parametrize("name", ["a.safetensors", "shards"])
def test_numbers_and_texts_are_told_apart_before_safetensors_are_written(name, tmp_path):
    def write(weights):
        if name == "shards":
            return save_weights_in_shards(weights, tmp_path / name, max_shard_bytes=8)
        return save_file(weights, tmp_path / name)

    with pytest.raises(IncompatibleCheckpointError, match=r"^\[1\] and \['1'\] would both be called '1' in a \.safet"):
        write({1: ONE, "1": TWO})
    with pytest.raises(IncompatibleCheckpointError, match="'__metadata__'"):
        write({"__metadata__": ONE, "w": TWO})
    assert not list(tmp_path.iterdir())


def test_a_streamed_tensor_is_not_called_as_the_header_is(tmp_path):
    with pytest.raises(IncompatibleCheckpointError, match="'__metadata__'"):
        stream_safetensors({"__metadata__": as_stored(ONE)}, tmp_path / "a.safetensors")
    with pytest.raises(IncompatibleCheckpointError, match="'__metadata__'"):
        stream_safetensors({"w": as_stored(ONE)}, tmp_path / "a.safetensors", aliases={"__metadata__": "w"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "shards"])
def test_conjugated_and_negated_views_are_tensors_of_their_own(name, tmp_path):
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    weights = {"a": tensor, "b": tensor.conj(), "c": torch._neg_view(tensor), "d": tensor}
    path = tmp_path / name
    if name == "shards":
        path = save_weights_in_shards(weights, path, max_shard_bytes=16)
    else:
        save_file(weights, path)
    found = load_file(path)
    with open_checkpoint(path) as source:
        for key, expected in weights.items():
            assert torch.equal(found[key], expected.resolve_conj().resolve_neg())
            assert torch.equal(source.weights[key].read(), expected.resolve_conj().resolve_neg())


def test_what_torch_saved_conjugated_is_read_conjugated(tmp_path):
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    torch.save({"a": tensor, "b": tensor.conj(), "n": torch._neg_view(ONE)}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as source:
        assert not source.aliases
        assert torch.equal(source.weights["b"].read(), tensor.conj().resolve_conj())
        assert torch.equal(source.weights["b"].read_range(1, 1), torch.tensor([3 + 1j]))
        assert torch.equal(source.weights["n"].read(), -ONE)
        stream_pt(source.tree, tmp_path / "b.pt")
    stream_pt({"a": tensor, "b": tensor.conj()}, tmp_path / "c.pt")
    for name in ("b.pt", "c.pt"):
        assert torch.equal(load_file(tmp_path / name)["b"], tensor.conj().resolve_conj())


def test_a_folder_keeps_empty_dicts_and_tensors_in_tuples(tmp_path):
    tree = {"a": {"c": {}}, "t": (as_stored(ONE), [as_stored(TWO)], 3), "w": as_stored(TWO)}
    stream_sharded(tree, tmp_path / "ep1", num_files=2)
    with open_checkpoint(tmp_path / "ep1") as source:
        assert source.tree["a"] == {"c": {}}
        assert set(source.tensors) == {"t/0", "t/1/0", "w"}
        assert torch.equal(source.tree["t"][0].read(), ONE)
        assert torch.equal(source.tree["t"][1][0].read(), TWO)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "folder"])
def test_what_has_no_elements_is_not_saved_as_if_it_had(name, tmp_path):
    write = save_sharded if name == "folder" else save_file
    with pytest.raises(TypeError, match=r"w is on the meta device|on the meta device \(w\)"):
        write({"v": ONE, "w": torch.empty(2, device="meta")}, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tree", [{"w" * 1025: ONE}, {"a": {"w" * 1023: ONE}}], ids=["flat", "joined"])
def test_a_name_that_would_not_be_read_is_not_written(tree, tmp_path):
    with pytest.raises(
        IncompatibleCheckpointError, match=r"has a name of 1025 characters .* no more than 1024 and 128"
    ):
        save_sharded(tree, tmp_path / "ep1")
    nested = ONE
    for _ in range(129):
        nested = {"a": nested}
    with pytest.raises(IncompatibleCheckpointError, match="and 129 keys"):
        save_sharded(nested, tmp_path / "ep1")
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_text_is_not_written_to_safetensors(tmp_path):
    with pytest.raises(IncompatibleCheckpointError, match="no text of Unicode"):
        save_file({"\ud800": ONE}, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
    save_file({"é/名\n\0": ONE}, tmp_path / "a.safetensors")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["é/名\n\0"], ONE)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*quantiz.*:DeprecationWarning")
def test_a_quantized_tensor_is_refused_before_a_sharded_checkpoint_is_written_or_read(tmp_path):
    quantized = torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8)
    with pytest.raises(IncompatibleCheckpointError, match=r"^model/w is quantized, as torch\.qint8, and"):
        save_sharded({"model": {"w": quantized}}, tmp_path / "ep1")
    assert not list(tmp_path.iterdir())
    save_sharded({"model": {"w": ONE}}, tmp_path / "ep1")
    with pytest.raises(IncompatibleCheckpointError, match=r"^model/w is quantized, as torch\.qint8, and .* loads into"):
        load_sharded({"model": {"w": quantized}}, tmp_path / "ep1")


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_tensors_that_read_one_memory_differently_are_saved_in_the_background_as_they_are(tmp_path):
    pair, sparse = torch.tensor([1 + 2j, 3 - 1j]), torch.eye(2).to_sparse()
    state = {
        "a": pair, "conjugated": pair.conj(), "floats": ONE, "bits": ONE.view(torch.int32),
        "none": torch.empty(0), "no counts": torch.empty(0, dtype=torch.int64), "adj": sparse, "tied": ONE,
    }  # fmt: skip
    with AsyncSaver() as saver:
        saver.save(state, tmp_path / "a.pt", stable_until_step=[ONE, sparse])
    found = load_file(tmp_path / "a.pt")
    for name in state.keys() - {"adj"}:
        assert found[name].dtype == state[name].dtype
        assert torch.equal(found[name], state[name].resolve_conj()), name
    assert torch.equal(found["adj"].to_dense(), torch.eye(2))
    assert found["tied"].data_ptr() == found["floats"].data_ptr()


def test_kinds_noted_under_the_names_of_before_are_turned_back(tmp_path):
    """As files have them that were written when `0` and `'0'`, `a/b` and `b` in `a` had one name."""
    kinds = {"x/0": "ndarray", "x/a/b": "timedelta", "x/True": "frozenset"}
    save_file({"x": {"0": ONE, "a/b": 5.0, True: {3}}}, tmp_path / "old.pt", info={"encoded": kinds})
    expected = {"0": ONE.numpy(), "a/b": timedelta(seconds=5), True: frozenset([3])}
    with open_checkpoint(tmp_path / "old.pt") as source:
        trees = [load_file(tmp_path / "old.pt"), source.tree]
    for tree in trees:
        assert [type(value) for value in tree["x"].values()] == [type(value) for value in expected.values()]
        assert tree["x"]["a/b"] == expected["a/b"]
