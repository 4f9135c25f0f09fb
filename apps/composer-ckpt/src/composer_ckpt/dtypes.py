"""Elements and dtypes of stored tensors. torch stores some dtypes that it cannot even convert."""

from collections.abc import Iterator
from functools import cache

import torch

from composer_checkpoint import IncompatibleCheckpointError
from composer_checkpoint.tensors import StoredTensor

BLOCK_NUMEL = 1 << 20
"""Elements that are read at a time, so that tensors of any size fit in memory."""


def blocks_of(*tensors: StoredTensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the elements of dense tensors of one size, block by block and next to each other."""
    numel = tensors[0].numel
    for start in range(0, numel, BLOCK_NUMEL):
        yield tuple(tensor.read_range(start, min(BLOCK_NUMEL, numel - start)) for tensor in tensors)


def layout_of(tensor: StoredTensor) -> dict[str, str]:
    """Return the layout of a sparse tensor; nothing for a dense one."""
    return {} if tensor.sparse is None else {"layout": str(tensor.sparse.layout).removeprefix("torch.")}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


@cache
def has_numbers(dtype: torch.dtype) -> bool:
    """Return whether torch can convert the elements of a dtype to numbers.

    Example:
        >>> has_numbers(torch.float8_e4m3fn), has_numbers(torch.bits8)
        (True, False)
    """
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        return False  # the value of an element depends on a scale
    wide = torch.complex128 if dtype.is_complex else torch.float64
    # Support depends on the release of torch, so a conversion is tried.
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(wide)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def refuse_without_numbers(name: str, dtype: torch.dtype, what: str, instead: str) -> None:
    """Raise an `IncompatibleCheckpointError` if torch cannot convert the elements to numbers, which `what` needs."""
    if not has_numbers(dtype):
        raise IncompatibleCheckpointError(
            f"{name} is {dtype}, with whose elements torch does not compute, and {what} needs numbers. {instead}"
        )
