"""Which algorithm acted on which event in which batches, in little memory however long the run is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Acting"]

_MOST_RANGES = 500


class Acting:
    """Stretches of batches, for each algorithm and event.

    Batches that follow one another are one stretch. Where there would be too many of them, neighbours that are close
    to each other become one, and the picture is as sharp as a screen can show.

    Example:
        >>> acting = Acting()
        >>> for batch in (0, 1, 2, 7):
        ...     acting.add("MixUp on before_forward", batch)
        >>> acting.as_dict()
        {'MixUp on before_forward': {'count': 4, 'batches': [[0, 2], [7, 7]]}}
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[list[int]]] = {}
        self._counts: dict[str, int] = {}
        self._gaps: dict[str, int] = {}

    def restore(self, acting: Mapping[str, Any]) -> None:
        """Go on with what `as_dict` has returned in an earlier part of the run."""
        self._ranges = {name: [list(batches) for batches in acted["batches"]] for name, acted in acting.items()}
        self._counts = {name: acted["count"] for name, acted in acting.items()}

    def add(self, name: str, batch: int) -> None:
        """Note that somebody acted in a batch."""
        ranges = self._ranges.setdefault(name, [])
        self._counts[name] = self._counts.get(name, 0) + 1
        gap = self._gaps.setdefault(name, 1)
        if ranges and 0 <= batch - ranges[-1][1] <= gap:
            ranges[-1][1] = batch
            return
        ranges.append([batch, batch])
        while len(ranges) > _MOST_RANGES:
            self._gaps[name] = gap = 2 * gap
            ranges[:] = _joined(ranges, gap)

    def as_dict(self) -> dict[str, dict[str, object]]:
        """Return, by name, how often it was and the stretches, each with its first and its last batch."""
        return {name: {"count": self._counts[name], "batches": ranges} for name, ranges in self._ranges.items()}


def _joined(ranges: Iterable[list[int]], gap: int) -> list[list[int]]:
    joined: list[list[int]] = []
    for first, last in ranges:
        if joined and 0 <= first - joined[-1][1] <= gap:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    return joined
