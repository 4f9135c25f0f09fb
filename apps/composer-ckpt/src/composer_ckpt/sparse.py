"""The elements of two sparse tensors in one order, to be compared."""

from collections.abc import Iterator

import torch

from composer_checkpoint import IncompatibleCheckpointError
from composer_checkpoint.tensors import StoredTensor

__all__ = ["side_by_side"]

_BLOCK_NUMEL = 1 << 20


def side_by_side(name: str, a: StoredTensor, b: StoredTensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, piece by piece, the elements that at least one of two sparse tensors has a place for.

    Args:
        name: What they are called, for the message.
        a: One of them.
        b: Another one of the same layout and shape.

    Raises:
        IncompatibleCheckpointError: If torch cannot bring their elements into one order.
    """
    try:
        values = _aligned(_coordinates(a.read()), _coordinates(b.read()))
    except (RuntimeError, NotImplementedError) as error:
        raise IncompatibleCheckpointError(
            f"{name} is a tensor of layout {a.read().layout}, of a kind that is not compared ({error!s:.200}). Choose "
            f"others with --keys, or load the files with load_file() and compare it dense."
        ) from error
    yield from zip(*(each.reshape(-1).split(_BLOCK_NUMEL) for each in values), strict=True)


def _coordinates(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.layout == torch.sparse_coo else tensor.to_sparse_coo()).coalesce()


def _aligned(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.sparse_dim() != b.sparse_dim():
        raise RuntimeError(f"{a.sparse_dim()} of its dims are sparse, and {b.sparse_dim()} in the other file")
    places = torch.cat([a.indices(), b.indices()], dim=1)
    if not places.shape[1]:
        return a.values(), b.values()
    known, order = torch.unique(places, dim=1, return_inverse=True)
    found: list[torch.Tensor] = []
    for tensor, own in ((a, order[: a.indices().shape[1]]), (b, order[a.indices().shape[1] :])):
        values = torch.zeros((known.shape[1], *tensor.values().shape[1:]), dtype=tensor.dtype)
        values[own] = tensor.values()
        found.append(values)
    return found[0], found[1]
