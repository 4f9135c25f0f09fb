"""The forms in which users give passes to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from composer_events.passes import AlgorithmPass


def parse_passes(passes: object) -> list[tuple[AlgorithmPass, int]]:
    """Turn what a user gives as `algorithm_passes` into passes and the places at which they are registered.

    Args:
        passes: `None`, a pass, a pass and its index as a tuple or a list of two, or a list of these. Index -1 means
            the end.

    Raises:
        ValueError: If it is anything else.
    """
    if passes is None:
        return []
    if isinstance(passes, list) and not _is_pass_with_index(cast(object, passes)):
        return [_parse_entry(entry) for entry in cast("list[object]", passes)]
    return [_parse_entry(cast(object, passes))]


def _parse_entry(entry: object) -> tuple[AlgorithmPass, int]:
    if callable(entry):
        return cast("AlgorithmPass", entry), -1
    if _is_pass_with_index(entry):
        return cast("tuple[AlgorithmPass, int]", tuple(cast("Sequence[Any]", entry)))
    raise ValueError(
        f"algorithm_passes holds {entry!r}, which is neither a pass, a function of (algorithms, event), nor a pass "
        f"with its index. Accepted: `f`, `(f, 0)`, or a list of these such as `[f, (g, 0)]`."
    )


def _is_pass_with_index(entry: object) -> bool:
    if not isinstance(entry, (tuple, list)):
        return False
    items = cast("Sequence[object]", entry)
    return len(items) == 2 and callable(items[0]) and isinstance(items[1], int)
