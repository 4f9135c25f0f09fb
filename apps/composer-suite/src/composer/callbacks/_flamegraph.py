"""Flame graphs: which lines of code hold how many bytes, as a picture that needs nothing but itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final
from xml.sax.saxutils import escape

from composer.callbacks._byte_counts import readable

__all__ = ["draw_flamegraph"]

_WIDTH: Final = 1200
_ROW_HEIGHT: Final = 16
_LETTER_WIDTH: Final = 7
_NARROWEST: Final = 0.1  # what is narrower than that cannot be seen


@dataclass(slots=True)
class _Frame:
    name: str
    size: int = 0
    inner: dict[str, _Frame] = field(default_factory=dict)


def draw_flamegraph(folded: str) -> str:
    """Return a flame graph as SVG.

    Args:
        folded: Lines such as `outermost;inner;innermost 4096`: a stack and its bytes.

    Reference:
        Gregg. "The Flame Graph", Communications of the ACM 59(6), 2016.
    """
    root = _fold(folded)
    boxes = list(_boxes(root, left=0.0, depth=0, scale=_WIDTH / max(root.size, 1)))
    height = (1 + max((depth for _, _, depth, _ in boxes), default=0)) * _ROW_HEIGHT
    drawn = "\n".join(
        _draw(frame, left, height - (depth + 1) * _ROW_HEIGHT, width) for frame, left, depth, width in boxes
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="monospace" font-size="11">\n{drawn}\n</svg>\n'
    )


def _fold(folded: str) -> _Frame:
    root = _Frame("all")
    for line in folded.splitlines():
        stack, _, size = line.rpartition(" ")
        frame = root
        frame.size += int(size)
        for name in stack.split(";"):
            frame = frame.inner.setdefault(name, _Frame(name))
            frame.size += int(size)
    return root


def _boxes(root: _Frame, left: float, depth: int, scale: float) -> Iterator[tuple[_Frame, float, int, float]]:
    """Yield each frame with its left end, its row from below and its width; stacks may be deeper than Python's."""
    waiting = [(root, left, depth)]
    while waiting:
        frame, left, depth = waiting.pop()
        if frame.size * scale < _NARROWEST:
            continue
        yield frame, left, depth, frame.size * scale
        for inner in sorted(frame.inner.values(), key=lambda each: each.name):
            waiting.append((inner, left, depth + 1))
            left += inner.size * scale


def _draw(frame: _Frame, left: float, top: int, width: float) -> str:
    hue = zlib.crc32(frame.name.encode()) % 50  # the same colour wherever the name is, between red and yellow
    num_letters = int(width / _LETTER_WIDTH) - 1
    label = frame.name if len(frame.name) <= num_letters else frame.name[: max(num_letters - 1, 0)] + "…"
    text = f'<text x="{left + 3:.1f}" y="{top + 12}">{escape(label)}</text>' if num_letters >= 3 else ""
    return (
        f"<g><title>{escape(frame.name)}: {readable(frame.size)}</title>"
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW_HEIGHT - 1}" fill="hsl({hue},80%,65%)"/>'
        f"{text}</g>"
    )
