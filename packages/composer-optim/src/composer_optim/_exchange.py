"""Exchange of sharded or replicated matrices, so that each is processed as a whole by one rank.

A tensor is assembled in stages, one for each axis of its device mesh. At a stage that shards, the ranks of the axis
send their chunks to the owner of the tensor, and receive their chunks of the result. At a stage that replicates, only
the owner processes the tensor, and sends the result to the others. Owners are chosen from the shapes alone, so that all
ranks choose alike, and so that the ranks have equal work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as tdist
from torch import Tensor

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """One axis of a mesh: its process group, and the dim of the tensor that it shards, `None` if it replicates."""

    group: tdist.ProcessGroup | None
    size: int
    rank: int
    dim: int | None


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing the class, which is slow."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def stages_of(tensor: Tensor, *, is_divided: bool) -> tuple[Stage, ...]:
    """Return the stages of a parameter, outermost first.

    Args:
        tensor: The parameter.
        is_divided: Whether the ranks share the work on plain tensors, which all ranks hold.
    """
    if not is_dtensor(tensor):
        if not (is_divided and tdist.is_available() and tdist.is_initialized() and tdist.get_world_size() > 1):
            return ()
        return (Stage(None, tdist.get_world_size(), tdist.get_rank(), None),)
    mesh, placements = tensor.device_mesh, tensor.placements  # pyright: ignore[reportAttributeAccessIssue]
    replicating, sharding, strided = [], [], []
    for axis, placement in enumerate(placements):
        if mesh.size(axis) == 1:
            continue
        stage = Stage(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), getattr(placement, "dim", None))
        # A strided shard is a chunk of what the later axes of the same dim have split before it.
        kind = replicating if stage.dim is None else strided if hasattr(placement, "split_factor") else sharding
        kind.append(stage)
    return (*replicating, *reversed(strided), *reversed(sharding))


class Exchange:
    """Processing of a list of tensors with the same stages, each by one rank.

    Args:
        stages: The stages, outermost first.
        shapes: The whole shape of each tensor.
        compute: Called with positions in the list and the whole tensors; returns a result of the same shape for each,
            and a vector for each, or no vectors.
        vector_dtype: Dtype of the vectors, if there are any. Vectors have as many elements as the first dim of the
            whole tensor, and go to all ranks.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        shapes: Sequence[Shape],
        compute: Callable[[list[int], list[Tensor]], tuple[list[Tensor], list[Tensor]]],
        *,
        vector_dtype: torch.dtype | None = None,
    ) -> None:
        self._stages = stages
        self._shapes = shapes
        self._compute = compute
        self._vector_dtype = vector_dtype
        # The shape of each tensor after the ranks of a stage have put their chunks together.
        self._gathered = [_shapes_after(shape, stages) for shape in shapes]
        # Of a Newton-Schulz iteration on a matrix of `rows` and `columns`, up to a factor.
        self._costs = [
            shape.numel() * min(shape[0], shape.numel() // max(1, shape[0])) for shape in map(torch.Size, shapes)
        ]

    def run(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's part of each result, and the vectors. Every rank of the mesh must call this."""
        return self._run(list(range(len(tensors))), tensors, 0)

    def _run(self, positions: list[int], tensors: list[Tensor], depth: int) -> tuple[list[Tensor], list[Tensor]]:
        if not positions:
            return [], []
        if depth == len(self._stages):
            return self._compute(positions, tensors)
        stage = self._stages[depth]
        owners = _assign(tuple(self._costs[position] for position in positions), stage.size)
        mine = [k for k, owner in enumerate(owners) if owner == stage.rank]
        owned = [positions[k] for k in mine]
        if stage.dim is None:
            results, vectors = self._run(owned, [tensors[k] for k in mine], depth + 1)
            results = _share(results, [tensor.shape for tensor in tensors], owners, stage, tensors[0])
        else:
            shapes = [self._gathered[position][depth] for position in positions]
            wholes = _gather(tensors, shapes, owners, stage, stage.dim)
            results, vectors = self._run(owned, wholes, depth + 1)
            results = _scatter(results, shapes, owners, stage, stage.dim, tensors[0])
        if self._vector_dtype is not None:
            lengths = [(self._shapes[position][0],) for position in positions]
            like = tensors[0].new_empty(0, dtype=self._vector_dtype)
            vectors = _share(vectors, lengths, owners, stage, like)
        return results, vectors


@cache
def _assign(costs: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the owner of each tensor: the rank with the least work so far, most costly tensors first."""
    loads = [0] * size
    owners = [0] * len(costs)
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owners[k] = loads.index(min(loads))
        loads[owners[k]] += costs[k]
    return tuple(owners)


def _chunk_sizes(length: int, size: int) -> list[int]:
    """Return the lengths of the chunks of a dim, as `Tensor.chunk`, with empty ones for the last ranks."""
    step = -(-length // size)
    return [max(0, min(step, length - rank * step)) for rank in range(size)]


def _shapes_after(shape: Shape, stages: Sequence[Stage]) -> list[Shape]:
    shapes: list[Shape] = []
    for stage in reversed(stages):  # from the whole tensor to the shard
        shapes.append(shape)
        if stage.dim is not None:
            shape = _with_length(shape, stage.dim, _chunk_sizes(shape[stage.dim], stage.size)[stage.rank])
    return shapes[::-1]


def _with_length(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _unpack(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _pack(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _all_to_all(sent: list[list[Tensor]], shapes: list[list[Shape]], stage: Stage, like: Tensor) -> list[list[Tensor]]:
    """Send a list of tensors to each rank, and return the tensors of the given shapes from each rank."""
    sizes_sent = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    sizes = [sum(torch.Size(shape).numel() for shape in each) for each in shapes]
    received = like.new_empty(sum(sizes))
    flat = _pack([tensor for tensors in sent for tensor in tensors], like)
    tdist.all_to_all_single(received, flat, sizes, sizes_sent, group=stage.group)
    return [_unpack(part, each) for part, each in zip(received.split(sizes), shapes, strict=True)]


def _gather(
    tensors: list[Tensor], shapes: Sequence[Shape], owners: Sequence[int], stage: Stage, dim: int
) -> list[Tensor]:
    """Return the tensors of this rank, put together from the chunks of all ranks of the stage."""
    sent = [[tensor for tensor, owner in zip(tensors, owners, strict=True) if owner == r] for r in range(stage.size)]
    own = [shape for shape, owner in zip(shapes, owners, strict=True) if owner == stage.rank]
    of_ranks = [
        [_with_length(shape, dim, _chunk_sizes(shape[dim], stage.size)[rank]) for shape in own]
        for rank in range(stage.size)
    ]
    received = _all_to_all(sent, of_ranks, stage, tensors[0])
    return [torch.cat(chunks, dim) for chunks in zip(*received, strict=True)]


def _scatter(
    results: list[Tensor], shapes: Sequence[Shape], owners: Sequence[int], stage: Stage, dim: int, like: Tensor
) -> list[Tensor]:
    """Return this rank's chunk of each result; the inverse of `_gather`."""
    chunks = [result.split(_chunk_sizes(result.shape[dim], stage.size), dim) for result in results]
    sent = [[parts[rank] for parts in chunks] for rank in range(stage.size)]
    of_ranks: list[list[Shape]] = [[] for _ in range(stage.size)]
    for shape, owner in zip(shapes, owners, strict=True):
        of_ranks[owner].append(_with_length(shape, dim, _chunk_sizes(shape[dim], stage.size)[stage.rank]))
    return _in_order(_all_to_all(sent, of_ranks, stage, like), owners)


def _share(
    results: list[Tensor], shapes: Sequence[Shape], owners: Sequence[int], stage: Stage, like: Tensor
) -> list[Tensor]:
    """Return all results, of which each rank of the stage has its own."""
    of_ranks: list[list[Shape]] = [[] for _ in range(stage.size)]
    for shape, owner in zip(shapes, owners, strict=True):
        of_ranks[owner].append(shape)
    sizes = [sum(torch.Size(shape).numel() for shape in each) for each in of_ranks]
    padded = like.new_zeros(max(sizes))
    padded[: sizes[stage.rank]] = _pack(results, like)
    received = like.new_empty(stage.size * len(padded))
    tdist.all_gather_into_tensor(received, padded, group=stage.group)
    starts = list(accumulate([len(padded)] * (stage.size - 1), initial=0))
    parts = [received[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return _in_order([_unpack(part, each) for part, each in zip(parts, of_ranks, strict=True)], owners)


def _in_order(of_ranks: Sequence[Sequence[Tensor]], owners: Sequence[int]) -> list[Tensor]:
    iterators = [iter(tensors) for tensors in of_ranks]
    return [next(iterators[owner]) for owner in owners]
