"""Python objects sent between ranks, as pickles in tensors of bytes held by the CPU.

Torch's own functions for this read the bytes by way of NumPy, which torch does not require, and send them through the
current CUDA device where a group has only NCCL.
"""

import pickle
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as tdist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["cpu_group", "gather_objects", "send_objects"]

_cpu_companions: "WeakKeyDictionary[ProcessGroup, ProcessGroup]" = WeakKeyDictionary()


def gather_objects(obj: object, group: "ProcessGroup | None") -> list[Any]:
    """Return every rank's object, in rank order; nothing on ranks outside the group."""
    if tdist.get_rank(group) < 0:
        return []
    group = cpu_group(group)
    payload = pickle.dumps(obj)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(tdist.get_world_size(group))]
    tdist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    longest = max(int(size) for size in sizes)
    buffers = [bytearray(longest) for _ in sizes]
    tdist.all_gather([_view(buffer) for buffer in buffers], _view(bytearray(payload.ljust(longest))), group=group)
    return [pickle.loads(buffer) for buffer in buffers]  # a pickle knows where it ends


def send_objects(object_list: list[Any], src: int, group: "ProcessGroup | None") -> None:
    """Replace the items by those of global rank `src`, in place; ranks outside the group keep theirs."""
    if tdist.get_rank(group) < 0:
        return
    group = cpu_group(group)
    is_source = tdist.get_rank() == src
    buffer = bytearray(pickle.dumps(object_list)) if is_source else bytearray()
    size = torch.tensor([len(buffer)])
    tdist.broadcast(size, src=src, group=group)
    buffer = buffer or bytearray(int(size))
    tdist.broadcast(_view(buffer), src=src, group=group)
    if not is_source:
        object_list[:] = pickle.loads(buffer)


def _view(buffer: bytearray) -> torch.Tensor:
    """Return a tensor that is the buffer, so that what arrives in one is in the other."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def cpu_group(group: "ProcessGroup | None") -> "ProcessGroup | None":
    """Return a group of the same ranks with a backend for the CPU: the same group, or a gloo companion.

    The companion is made at a group's first need of it, which all of its ranks reach together.
    """
    if "cpu:" in tdist.get_backend_config(group):
        return group
    key = group or tdist.group.WORLD
    assert key is not None  # the callers have asked
    companion = _cpu_companions.get(key)
    if companion is None:
        ranks = tdist.get_process_group_ranks(key)
        companion = tdist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert not isinstance(companion, int)  # a number stands for groups of other ranks
        _cpu_companions[key] = companion
    return companion
