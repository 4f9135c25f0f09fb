"""With which dtypes torch computes; it stores some that it cannot even convert."""

from functools import cache

import torch

from composer_checkpoint import IncompatibleCheckpointError

__all__ = ["has_numbers", "refuse_without_numbers"]


@cache
def has_numbers(dtype: torch.dtype) -> bool:
    """Say whether torch converts the elements of a dtype to numbers.

    Example:
        >>> has_numbers(torch.float8_e4m3fn), has_numbers(torch.bits8)
        (True, False)
    """
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        return False  # not without a scale
    wide = torch.complex128 if dtype.is_complex else torch.float64
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(wide)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def refuse_without_numbers(name: str, dtype: torch.dtype, what: str, instead: str) -> None:
    """Refuse a tensor with whose dtype torch does not compute.

    Args:
        name: Of the tensor.
        dtype: Its.
        what: What needs numbers.
        instead: What to do.

    Raises:
        IncompatibleCheckpointError: If torch does not.
    """
    if not has_numbers(dtype):
        raise IncompatibleCheckpointError(
            f"{name} is {dtype}, with whose elements torch does not compute, and {what} needs numbers. {instead}"
        )
