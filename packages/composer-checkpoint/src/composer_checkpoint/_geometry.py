"""Whether a tensor's declared shape fits the bytes that it is given."""

import math
from typing import Any

from composer_checkpoint.errors import CorruptCheckpointError, shown

__all__ = ["MAX_EXPANDED_VIEW_BYTES", "check_geometry"]

# A view may repeat elements (an expanded mask, say), which costs nothing until somebody copies it.
MAX_EXPANDED_VIEW_BYTES = 64 << 20
_MAX_DIMS = 64


def check_geometry(name: str, size: Any, stride: Any, offset: Any, storage_numel: int, item_bytes: int) -> None:
    """Refuse a tensor that reaches past its storage or repeats a few bytes into a huge one.

    Raises:
        CorruptCheckpointError: With the name, what was declared and what there is.
    """
    numbers = (*size, *stride, offset)
    if (
        len(size) != len(stride)
        or len(size) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
    ):
        raise CorruptCheckpointError(
            f"{name} has shape {shown(tuple(size))}, stride {shown(tuple(stride))} and offset {shown(offset)}: these "
            f"are not equally many whole numbers from 0 for at most {_MAX_DIMS} dims. Load another checkpoint."
        )
    numel = math.prod(size)
    if numel == 0:
        return
    needed = offset + 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if needed > storage_numel:
        raise CorruptCheckpointError(
            f"{name} of shape {shown(tuple(size))} and stride {shown(tuple(stride))} needs {needed} elements, and the "
            f"file has {storage_numel} for it. Load another checkpoint."
        )
    if numel > storage_numel and numel * item_bytes > MAX_EXPANDED_VIEW_BYTES:
        raise CorruptCheckpointError(
            f"{name} of shape {shown(tuple(size))} and stride {shown(tuple(stride))} repeats {storage_numel} elements "
            f"into {numel * item_bytes} bytes, more than the {MAX_EXPANDED_VIEW_BYTES} that a view may repeat. If it "
            f"is meant to be so large, save it with .contiguous()."
        )
