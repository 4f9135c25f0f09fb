"""Which spans have begun in a file and not ended there."""

from collections.abc import Iterable
from typing import Any

__all__ = ["OpenSpans"]


class OpenSpans:
    """Follows the begins and ends of what is written, so that ends that come later find their begins.

    Example:
        >>> spans = OpenSpans()
        >>> spans.note({"name": "fit", "ph": "B", "ts": 1}), spans.note({"name": "epoch", "ph": "B", "ts": 2})
        (True, True)
        >>> later = [{"name": "batch", "ph": "B", "ts": 3}, {"name": "batch", "ph": "E", "ts": 4}]
        >>> ends, others = spans.take_ends([*later, {"name": "fit", "ph": "E", "ts": 5}])
        >>> [(end["name"], end["ts"]) for end in ends], others == later
        ([('epoch', 5), ('fit', 5)], True)
    """

    def __init__(self) -> None:
        self._open: list[dict[str, Any]] = []  # the begins, outermost first

    def note(self, event: dict[str, Any]) -> bool:
        """Take what is about to be written; false if it ends what has not begun, or was ended for it."""
        if event.get("ph") == "B":
            self._open.append(event)
        elif event.get("ph") == "E":
            begin = _begin_of(event, self._open)
            if begin is None:
                return False
            self._open.pop(begin)
        return True

    def take_ends(self, events: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Part the ends of open spans from all other events.

        What is open inside of a span that ends, and has no end of its own, as an epoch that training left in its
        middle, ends with it.
        """
        ends: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        begun: list[dict[str, Any]] = []
        for event in events:
            unwritten = _begin_of(event, begun) if event.get("ph") == "E" else None
            if event.get("ph") == "E" and unwritten is None and _begin_of(event, self._open) is not None:
                ends.append(event)
                continue
            if event.get("ph") == "B":
                begun.append(event)
            elif unwritten is not None:
                begun.pop(unwritten)
            others.append(event)
        return list(self._with_inner(ends)), others

    def end_all(self, time_us: int) -> list[dict[str, Any]]:
        """Return the ends of what is open, the innermost first; then nothing is.

        Args:
            time_us: When all of it ends, in microseconds since 1970.
        """
        ends = [
            {key: begin[key] for key in ("name", "cat", "pid", "tid") if key in begin} | {"ph": "E", "ts": time_us}
            for begin in reversed(self._open)
        ]
        self._open.clear()
        return ends

    def _with_inner(self, ends: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Yield ends, and before each those of spans inside of it that have none; then all of them are closed."""
        for position, end in enumerate(ends):
            begin = _begin_of(end, self._open)
            if begin is None:
                continue
            own_ends = ends[position + 1 :]
            for inner in reversed(range(begin + 1, len(self._open))):
                span = self._open[inner]
                if _is_same_thread(span, end) and _begin_of(span, own_ends) is None:
                    yield {**end, **{key: span[key] for key in ("name", "cat") if key in span}}
                    self._open.pop(inner)
            self._open.pop(begin)
            yield end


def _begin_of(event: dict[str, Any], events: list[dict[str, Any]]) -> int | None:
    """Return the place of the latest event of the same span, if there is one."""
    for place in reversed(range(len(events))):
        if events[place].get("name") == event.get("name") and _is_same_thread(events[place], event):
            return place
    return None


def _is_same_thread(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one.get("pid"), one.get("tid")) == (other.get("pid"), other.get("tid"))
