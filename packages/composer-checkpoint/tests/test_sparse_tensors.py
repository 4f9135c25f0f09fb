"""A sparse tensor is one tensor: it is read and written as it is, or refused by its name, and never taken apart."""

import pytest
import torch

from composer_checkpoint import (
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    inspect_file,
    load_file,
    read_manifest,
    save_file,
    save_sharded,
)
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

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Validating sparse tensor invariants")


LAYOUTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


def in_all_layouts():
    dense = torch.tensor([[0.0, 2.0, 0.0, 1.0], [0.0] * 4, [3.0, 0.0, 0.0, 0.0], [0.0] * 4])
    blocks = {"sparse_bsr": {"blocksize": (2, 2)}, "sparse_bsc": {"blocksize": (2, 2)}}
    return {
        **{name: dense.to_sparse(layout=getattr(torch, name), **blocks.get(name, {})) for name in LAYOUTS},
        "of rows": dense.to_sparse(1),
        "twice": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
        "empty": torch.zeros(3, 3, dtype=torch.int64).to_sparse(),
        "large": torch.sparse_coo_tensor([[1 << 30], [7]], [1.0], (1 << 31, 9)),
    }


def assert_same(found, expected):
    assert (found.layout, found.shape, found.dtype) == (expected.layout, expected.shape, expected.dtype)
    if expected.layout != torch.sparse_coo:
        assert torch.equal(found.to_dense(), expected.to_dense())
        return
    assert found.is_coalesced() == expected.is_coalesced()
    assert torch.equal(found._indices(), expected._indices())
    assert torch.equal(found._values(), expected._values())


@pytest.mark.parametrize("is_legacy", [False, True])
@pytest.mark.parametrize("name", [*LAYOUTS, "of rows", "twice", "empty", "large"])
def test_it_is_read_and_written_as_it_is(name, is_legacy, tmp_path):
    tensor = in_all_layouts()[name]
    torch.save({"adj": tensor, "w": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=not is_legacy)
    with open_checkpoint(tmp_path / "a.pt") as source:
        assert list(source.tensors) == ["adj", "w"]
        assert_same(source.tensors["adj"].read(), tensor)
        stream_pt(source.tree, tmp_path / "b.pt")
    assert_same(load_file(tmp_path / "b.pt")["adj"], tensor)
    assert_same(torch.load(tmp_path / "b.pt")["adj"], tensor)


def test_one_in_memory_is_written_as_it_is(tmp_path):
    tensors = in_all_layouts()
    stream_pt(tensors, tmp_path / "a.pt")
    for name, found in load_file(tmp_path / "a.pt").items():
        assert_same(found, tensors[name])


def test_a_cast_changes_the_values_alone(tmp_path):
    found = as_stored(torch.eye(3).to_sparse()).to(torch.float16).read()
    assert_same(found, torch.eye(3).half().to_sparse())


@pytest.mark.parametrize(
    "write",
    [
        lambda tree, folder: stream_safetensors(tree["model"], folder / "x.safetensors"),
        lambda tree, folder: stream_sharded(tree, folder / "x"),
        lambda tree, folder: stream_local(tree, folder / "x_rank{rank}.pt", world_size=2),
    ],
)
def test_formats_without_sparse_tensors_refuse_it_by_its_name(write, tmp_path):
    tree = {"model": {"w": as_stored(torch.ones(2)), "adj": as_stored(torch.eye(4).to_sparse())}}
    with pytest.raises(IncompatibleCheckpointError, match=r"adj is a tensor of layout torch\.sparse_coo, and "):
        write(tree, tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_is_not_read_in_pieces():
    with pytest.raises(IncompatibleCheckpointError, match=r"torch\.sparse_coo, and sparse tensors are not read in pie"):
        as_stored(torch.eye(4).to_sparse()).read_range(0, 2)


def test_a_description_has_it_as_one(tmp_path):
    save_file({"adj": torch.eye(4).to_sparse(), "w": torch.ones(2)}, tmp_path / "a.pt")
    found = inspect_file(tmp_path / "a.pt").tensors
    assert {name: (each.shape, each.layout, each.dtype, each.size_bytes) for name, each in found.items()} == {
        "adj": ((4, 4), "sparse_coo", "float32", 4 * 2 * 8 + 4 * 4),
        "w": ((2,), "strided", "float32", 8),
    }
    assert set(read_manifest(tmp_path / "a.pt").tensors) == {"adj/indices", "adj/values", "w"}


def test_parts_that_do_not_fit_the_size_are_refused(tmp_path):
    with torch.sparse.check_sparse_tensor_invariants(False):
        outside = torch.sparse_coo_tensor([[9], [9]], [1.0], (2, 2))
    torch.save({"adj": outside}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as source, pytest.raises(CorruptCheckpointError, match="do not fit"):
        source.tensors["adj"].read()


class _Pickled:
    """Pickles as a call of the function that puts sparse tensors together."""

    def __init__(self, layout, data):
        self.arguments = layout, data

    def __reduce__(self):
        return torch._utils._rebuild_sparse_tensor, self.arguments


@pytest.mark.parametrize(
    ("layout", "data"),
    [
        (torch.sparse_coo, (torch.ones(1, 1).long(), torch.ones(1))),
        (torch.sparse_coo, (torch.ones(1, 1).long(), 3, torch.Size([2]))),
        (torch.sparse_coo, (torch.ones(1, 1).long(), torch.ones(1), torch.Size([1 << 40, 1 << 40]))),
        (torch.sparse_coo, (torch.ones(1, 1).long(), torch.ones(1), 5)),
        (torch.sparse_coo, (torch.ones(1, 1).long(), torch.ones(1), torch.Size([2]), "yes")),
        (torch.sparse_csr, (torch.ones(1).long(), torch.ones(1).long(), torch.ones(1), torch.Size([1, 1]), True)),
        (torch.strided, (torch.ones(1, 1).long(), torch.ones(1), torch.Size([2]))),
        ("sparse", ()),
    ],
)
def test_a_sparse_tensor_of_other_parts_is_refused(layout, data, tmp_path):
    torch.save({"adj": _Pickled(layout, data)}, tmp_path / "a.pt")
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("name", [*LAYOUTS, "of rows", "empty"])
def test_a_sharded_save_refuses_it_with_its_place(name, tmp_path):
    adj = in_all_layouts()[name]
    state = {"model": {"w": torch.ones(2)}, "optim": {"state": [{"exp_avg": adj}]}}
    place = rf"^optim/state/0/exp_avg is a tensor of layout {adj.layout}, and .* to_dense\(\) .* save_file\(\)"
    with pytest.raises(IncompatibleCheckpointError, match=place):
        save_sharded(state, tmp_path / "ep1")
    assert not list(tmp_path.iterdir())


def test_one_inside_a_tuple_of_a_sharded_checkpoint_is_kept(tmp_path):
    adj = torch.eye(2).to_sparse()
    save_sharded({"seen": (adj, 3)}, tmp_path / "ep1")
    state = {"seen": None}
    load_sharded(state, tmp_path / "ep1")
    assert_same(state["seen"][0], adj)
    with open_checkpoint(tmp_path / "ep1") as source:
        assert_same(source.tensors["seen/0"].read(), adj)


def test_a_sharded_checkpoint_is_not_loaded_into_one(tmp_path):
    save_sharded({"model": {"adj": torch.eye(2)}}, tmp_path / "ep1")
    adj = torch.eye(2).to_sparse()
    with pytest.raises(IncompatibleCheckpointError, match=r"^model/adj is a .*\.sparse_coo, .* loads into dense ones"):
        load_sharded({"model": {"adj": adj}}, tmp_path / "ep1")


def save_on_one_rank_sparse(folder):
    import torch.distributed as tdist

    extra = {"adj": torch.eye(2).to_sparse()} if tdist.get_rank() == 1 else {}
    with pytest.raises(IncompatibleCheckpointError) as caught:
        save_sharded({"model": {"w": torch.ones(2), **extra}}, folder)
    return str(caught.value)


def test_every_rank_hears_of_one_that_has_a_sparse_tensor(tmp_path):
    told = run_ranks(save_on_one_rank_sparse, tmp_path / "ep1", store=tmp_path / "store")
    assert told[0] == told[1]
    assert told[0].startswith("model/adj is a tensor of layout torch.sparse_coo, and a sharded checkpoint")
    assert not (tmp_path / "ep1").exists()
