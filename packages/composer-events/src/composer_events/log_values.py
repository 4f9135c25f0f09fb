"""How a logged value reads on a console or in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

__all__ = ["format_log_data_value", "is_tensor"]


def format_log_data_value(data: Any) -> str:
    """Write a logged value as text.

    Args:
        data: Text is quoted, a float gets four decimals, a tensor with one element reads as that element and any
            other, or one on the `meta` device, as its shape. Mappings and other iterables are written element by
            element.

    Raises:
        TypeError: If a mapping has a key that is not a string.

    Example:
        >>> format_log_data_value({"loss": 0.70341, "names": ["a", "b"]})
        '{ "loss": 0.7034, "names": ["a", "b"], }'
    """
    if data is None:
        return "None"
    if isinstance(data, str):
        return f'"{data}"'
    if isinstance(data, int):
        return str(data)
    if isinstance(data, float):
        return f"{data:.4f}"
    if is_tensor(data):
        has_number = data.numel() == 1 and not data.is_meta
        return format_log_data_value(data.cpu().item()) if has_number else f"Tensor of shape {data.shape}"
    if isinstance(data, Mapping):
        return _format_mapping(cast("Mapping[Any, Any]", data))
    # An array without axes calls itself iterable and is not.
    if isinstance(data, Iterable) and getattr(cast(Any, data), "ndim", 1) != 0:
        items = cast("Iterable[Any]", data)
        return f"[{', '.join(map(format_log_data_value, items))}]"
    return str(cast(object, data))


def _format_mapping(data: Mapping[Any, Any]) -> str:
    for key in data:
        if not isinstance(key, str):
            raise TypeError(
                f"The key {key!r} of a logged mapping is a {type(key).__name__}; names of logged values are strings. "
                f"Write {str(key)!r}."
            )
    items = (f'"{key}": {format_log_data_value(value)}, ' for key, value in data.items())
    return f"{{ {''.join(items)}}}"


def is_tensor(data: Any) -> bool:
    """Answer whether a value is a tensor, without importing torch.

    Args:
        data: The value.
    """
    # Nothing is a tensor in a process that has not imported torch, and only to find that out it is too slow.
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor)
