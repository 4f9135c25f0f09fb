"""Collectives of `torch.distributed` that also work in a single process.

With several ranks each function calls torch's own. Without a process group, or in a group of one rank, it returns at
once. If several processes were started without a group it raises: each would otherwise train a model of its own.
"""

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as tdist

from composer_dist.env import get_world_size
from composer_dist.progress import waiting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "is_available",
    "is_initialized",
    "barrier",
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_object",
    "all_gather_object_list_hpu",
    "cpu_group",
    "gather_objects",
    "group_for",
    "send_objects",
]

T = TypeVar("T")

_REDUCE_OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")


def is_available() -> bool:
    """Return whether torch was built with its distributed package."""
    return tdist.is_available()


def is_initialized() -> bool:
    """Return whether a process group exists."""
    return tdist.is_available() and tdist.is_initialized()


def barrier(group: "ProcessGroup | None" = None) -> None:
    """Wait until every rank has called this. Every rank of the group must call this.

    Raises:
        RuntimeError: If several processes were started without a process group.
    """
    if not _is_alone(group):
        with waiting:
            tdist.barrier(group=group)


def all_reduce(tensor: torch.Tensor, reduce_operation: str = "SUM", group: "ProcessGroup | None" = None) -> None:
    """Reduce the tensor over all ranks, in place. Every rank of the group must call this.

    Args:
        tensor: Of the same shape and dtype on every rank.
        reduce_operation: SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or AVG if the backend has it. Case does not matter.
        group: The ranks to reduce over. All of them when `None`.

    Raises:
        ValueError: If `reduce_operation` is unknown.
        RuntimeError: If several processes were started without a process group.
    """
    operation = reduce_operation.upper()
    if operation not in _REDUCE_OPERATIONS:
        raise ValueError(
            f"reduce_operation={reduce_operation!r} is not a reduction. Use one of {', '.join(_REDUCE_OPERATIONS)}."
        )
    if not _is_alone(group):
        with waiting:
            tdist.all_reduce(tensor, op=getattr(tdist.ReduceOp, operation), group=group_for(tensor, group))


def broadcast(tensor: torch.Tensor, src: int, group: "ProcessGroup | None" = None) -> None:
    """Replace the tensor with that of global rank `src`, in place. Every rank of the group must call this.

    Raises:
        RuntimeError: If several processes were started without a process group.
    """
    if not _is_alone(group):
        with waiting:
            tdist.broadcast(tensor, src=src, group=group_for(tensor, group))


def broadcast_object_list(object_list: list[Any], src: int = 0, group: "ProcessGroup | None" = None) -> None:
    """Replace the list's items with those of global rank `src`, in place. Every rank of the group must call this.

    The objects are pickled, so the ranks must trust each other.

    Args:
        object_list: The items to send on `src`; placeholders on the other ranks.
        src: The global rank to send from.
        group: The ranks that take part. All of them when `None`.

    Raises:
        ValueError: On every rank of the group, if `src` is not a member.
        RuntimeError: If several processes were started without a process group.
    """
    # Checked on every member of the group, so that none waits for a rank that never sends.
    if is_initialized() and tdist.get_rank(group) >= 0 and src not in (ranks := tdist.get_process_group_ranks(group)):
        raise ValueError(
            f"src={src!r} is not a rank of the group, which has the global ranks {ranks}. Pass one of them: src counts "
            "among all ranks, not inside the group."
        )
    if not _is_alone(group):
        with waiting:
            send_objects(object_list, src, group)


def all_gather(tensor: torch.Tensor, group: "ProcessGroup | None" = None) -> Sequence[torch.Tensor]:
    """Return every rank's tensor, in rank order. Every rank of the group must call this.

    Args:
        tensor: Of the same shape and dtype on every rank.
        group: The ranks that take part. All of them when `None`.

    Returns:
        One tensor for each rank of the group; `[tensor]` itself in a single process.

    Raises:
        RuntimeError: If several processes were started without a process group.
    """
    if _is_alone(group):
        return [tensor]
    size = tdist.get_world_size(group)
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    with waiting:
        tdist.all_gather(gathered, tensor.contiguous(), group=group_for(tensor, group))  # NCCL rejects other layouts
    return gathered


def all_gather_object(obj: T, group: "ProcessGroup | None" = None) -> list[T]:
    """Return every rank's object, in rank order. Every rank of the group must call this.

    The objects are pickled, so the ranks must trust each other.

    Args:
        obj: A picklable object.
        group: The ranks that take part. All of them when `None`.

    Returns:
        One object for each rank of the group; `[obj]` itself, not a copy, in a single process.

    Raises:
        RuntimeError: If several processes were started without a process group.
    """
    if _is_alone(group):
        return [obj]
    with waiting:
        return gather_objects(obj, group)


def all_gather_object_list_hpu(object_list: list[Any], obj: Any, group: "ProcessGroup | None" = None) -> None:
    """Fill the list with every rank's object, in place; kept for scripts written for Habana devices."""
    object_list[:] = all_gather_object(obj, group=group)


def _is_alone(group: "ProcessGroup | None") -> bool:
    """Return whether this process is the only rank; raise if other ranks were started but cannot be reached."""
    if is_initialized():
        return tdist.get_world_size(group) == 1
    world_size = get_world_size()
    if world_size == 1:
        return True
    raise RuntimeError(
        f"the world size is {world_size}, but the distributed package is not available or has not been initialized, "
        "so the ranks cannot reach each other. Call initialize_dist() first, in processes started by the `composer` "
        "launcher or by torchrun, or unset WORLD_SIZE to train in one process."
    )


# Weak keys, so that the entry of a destroyed group is removed with it.
_cpu_companions: "WeakKeyDictionary[ProcessGroup, ProcessGroup]" = WeakKeyDictionary()


def gather_objects(obj: object, group: "ProcessGroup | None") -> list[Any]:
    """Return every rank's object, in rank order; nothing on ranks outside the group."""
    if tdist.get_rank(group) < 0:
        return []
    # Not by torch's `all_gather_object`, which needs NumPy.
    group = cpu_group(group)
    payload = pickle.dumps(obj)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(tdist.get_world_size(group))]
    tdist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    # all_gather needs tensors of one size, so shorter payloads are padded.
    longest = max(int(size) for size in sizes)
    # Bytearrays, since torch warns about tensors in read-only memory.
    buffers = [bytearray(longest) for _ in sizes]
    tdist.all_gather([_view(buffer) for buffer in buffers], _view(bytearray(payload.ljust(longest))), group=group)
    return [pickle.loads(buffer) for buffer in buffers]  # ignores the padding after the end of the pickle


def send_objects(object_list: list[Any], src: int, group: "ProcessGroup | None") -> None:
    """Replace the items with those of global rank `src`, in place; ranks outside the group keep theirs."""
    if tdist.get_rank(group) < 0:
        return
    group = cpu_group(group)
    is_source = tdist.get_rank() == src
    buffer = bytearray(pickle.dumps(object_list)) if is_source else bytearray()
    size = torch.tensor([len(buffer)])
    tdist.broadcast(size, src=src, group=group)
    buffer = buffer or bytearray(int(size))  # receivers know the size only now
    tdist.broadcast(_view(buffer), src=src, group=group)
    if not is_source:
        object_list[:] = pickle.loads(buffer)


def _view(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def group_for(tensor: torch.Tensor, group: "ProcessGroup | None") -> "ProcessGroup | None":
    """Return a group that carries the tensor: a script may have made one for GPUs only."""
    return cpu_group(group) if tensor.is_cpu else group


def cpu_group(group: "ProcessGroup | None") -> "ProcessGroup | None":
    """Return a group of the same ranks with a backend for the CPU: the same group, or a gloo companion.

    The companion is created on first use, which all ranks of the group must reach together.
    """
    # Objects are exchanged as CPU tensors, which NCCL alone cannot carry.
    if "cpu:" in tdist.get_backend_config(group):
        return group
    key = group or tdist.group.WORLD
    assert key is not None  # every caller has checked that a process group exists
    companion = _cpu_companions.get(key)
    if companion is None:
        ranks = tdist.get_process_group_ranks(key)
        # Local synchronization, since ranks outside the group do not call this.
        companion = tdist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert not isinstance(companion, int)  # a number stands for groups of other ranks
        _cpu_companions[key] = companion
    return companion
