"""Tensors of classes of one's own in a sharded checkpoint: their elements are saved, or nothing is."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from composer_checkpoint import UnsafeCheckpointError, load_file, save_sharded
from composer_checkpoint.sharded import load_sharded
from composer_dist.testing import run_ranks


class Labelled(torch.Tensor):
    """Says no more than its elements."""


@pytest.mark.parametrize("wrap", [lambda t: t.as_subclass(Labelled), torch.nn.Buffer, torch.nn.Parameter])
def test_what_was_saved_of_another_class_is_loaded(wrap, tmp_path):
    save_sharded({"w": wrap(torch.arange(3.0))}, tmp_path / "ep1")
    state = {"w": torch.zeros(3)}
    load_sharded(state, tmp_path / "ep1")
    assert torch.equal(state["w"], torch.arange(3.0))


def test_one_made_of_other_tensors_is_refused_by_name_and_nothing_is_left(tmp_path):
    with pytest.raises(UnsafeCheckpointError, match="w \\(a tensor of the class TwoTensor\\)"):
        save_sharded({"w": TwoTensor(torch.ones(2), torch.ones(2))}, tmp_path / "ep1")
    assert not list(tmp_path.iterdir())


def save_on_its_way(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad():
        shards = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        on_its_way = shards.redistribute(mesh, [Replicate()], async_op=True).to_local()
    save_sharded({"w": on_its_way}, folder)
    return type(on_its_way).__name__


def test_what_a_collective_has_yet_to_bring_is_waited_for(tmp_path):
    assert run_ranks(save_on_its_way, tmp_path / "ep1", store=tmp_path / "store") == ["AsyncCollectiveTensor"] * 2
    state = {"w": torch.zeros(4)}
    load_sharded(state, tmp_path / "ep1")
    assert torch.equal(state["w"], torch.arange(4.0))


class OfDeviceWithoutStorage:
    """A tensor that pickles as those of XLA do."""

    def __init__(self, values):
        self.values = values

    def __reduce__(self):
        args = (self.values, self.values.dtype, "xla:0", False)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, args


def test_a_tensor_of_a_device_without_storages_is_read(tmp_path):
    """It was refused as more than data."""
    torch.save({"weight": OfDeviceWithoutStorage(torch.arange(4.0)[1:])}, tmp_path / "file.pt")
    assert load_file(tmp_path / "file.pt")["weight"].equal(torch.tensor([1.0, 2.0, 3.0]))
