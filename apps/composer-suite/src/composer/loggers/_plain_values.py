"""Settings of any kind as what JSON and YAML can have."""

from collections.abc import Mapping
from typing import Any, cast

__all__ = ["to_plain"]

_DEEPEST = 50


def to_plain(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Return a value with texts in place of what JSON cannot have, such as keys and what contains itself."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    within = (*outer, id(value))
    if isinstance(value, (Mapping, list, tuple)) and id(value) not in outer and len(outer) < _DEEPEST:
        if isinstance(value, Mapping):
            return {_text(key): to_plain(item, within) for key, item in cast("Mapping[Any, Any]", value).items()}
        return [to_plain(item, within) for item in cast("list[Any]", value)]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # whatever somebody else's object raises
        return f"<{type(value).__name__}: {type(error).__name__}>"
