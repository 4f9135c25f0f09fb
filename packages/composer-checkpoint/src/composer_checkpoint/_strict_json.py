"""JSON in which no object has a name twice: readers would not agree which of the two values counts."""

import json
from collections import Counter
from typing import Any

__all__ = ["parse_json"]


def parse_json(text: str | bytes) -> Any:
    """Parse a text.

    Raises:
        ValueError: If it is not JSON, or an object has a name twice.
        RecursionError: If it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.200} occurs twice in one object")
    return found
