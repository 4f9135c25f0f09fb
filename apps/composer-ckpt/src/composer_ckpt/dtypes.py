"""Dtypes that torch can compute with; it stores some that it cannot even convert."""

from functools import cache

import torch

from composer_checkpoint import IncompatibleCheckpointError

__all__ = ["has_numbers", "refuse_without_numbers"]


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
    """Raise if torch cannot compute with a tensor's dtype.

    Args:
        name: Name of the tensor.
        dtype: Dtype of the tensor.
        what: The operation that needs numbers, for the message.
        instead: Advice for the message.

    Raises:
        IncompatibleCheckpointError: If torch cannot convert the elements to numbers.
    """
    if not has_numbers(dtype):
        raise IncompatibleCheckpointError(
            f"{name} is {dtype}, with whose elements torch does not compute, and {what} needs numbers. {instead}"
        )
