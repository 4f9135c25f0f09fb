"""Pages that show what CUDA's allocator did, and need nothing but themselves: no network, no other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from composer.callbacks._byte_counts import readable

if TYPE_CHECKING:
    from composer.callbacks._cuda_memory import Snapshot

__all__ = ["segment_page", "timeline_page"]

_MAX_FRAMES: Final = 24  # of a stack; the outer ones are the same everywhere

# A box is [left, right, bottom, top, stack]. Boxes do not overlap, so whatever is under the pointer is found by a scan.
_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$TITLE</title>
<style>
body { font: 13px sans-serif; margin: 1em; }
canvas { width: 100%; height: 60vh; border: 1px solid #999; }
pre { min-height: 20em; white-space: pre-wrap; }
</style>
</head>
<body>
<h1>$TITLE</h1>
<div id="plots"></div>
<pre id="about">Point at a box.</pre>
<script type="application/json" id="composer-data">$DATA</script>
<script>
const data = JSON.parse(document.getElementById("composer-data").textContent);
const about = document.getElementById("about");
for (const plot of data.plots) {
  const heading = document.createElement("h2");
  heading.textContent = plot.title;
  const canvas = document.createElement("canvas");
  document.getElementById("plots").append(heading, canvas);
  canvas.width = canvas.clientWidth;
  canvas.height = canvas.clientHeight;
  const ink = canvas.getContext("2d");
  const across = canvas.width / Math.max(plot.width, 1), up = canvas.height / Math.max(plot.height, 1);
  for (const [left, right, bottom, top, stack] of plot.boxes) {
    ink.fillStyle = `hsl(${stack * 47 % 360} 60% 65%)`;
    ink.fillRect(left * across, canvas.height - top * up,
                 Math.max((right - left) * across, 1), Math.max((top - bottom) * up, 1));
  }
  ink.fillStyle = "#c00";
  for (const mark of plot.marks) ink.fillRect(mark * across, 0, 2, canvas.height);
  canvas.addEventListener("mousemove", (event) => {
    const x = event.offsetX * canvas.width / canvas.clientWidth / across;
    const y = (canvas.height - event.offsetY * canvas.height / canvas.clientHeight) / up;
    const index = plot.boxes.findIndex(([l, r, b, t]) => l <= x && x < r && b <= y && y < t);
    about.textContent = index < 0 ? "" : plot.notes[index] + "\\n" + data.stacks[plot.boxes[index][4]];
  });
}
</script>
</body>
</html>
"""


def timeline_page(snapshot: Snapshot) -> str:
    """Return a page with each allocation as a box: when it was in use, and where.

    Time counts what the allocator did. Addresses that were not in use at all are left out; red lines are where memory
    ran out.
    """
    stacks = _Stacks()
    plots = [
        _plot_of_device(device, trace, list(_segments_of(snapshot, device)), stacks)
        for device, trace in enumerate(snapshot["device_traces"])
        if trace
    ]
    return _page("Memory in use", plots, stacks)


def segment_page(snapshot: Snapshot) -> str:
    """Return a page with each segment as a row, and in it the blocks as they are now."""
    stacks = _Stacks()
    devices = sorted({segment.get("device", 0) for segment in snapshot["segments"]})
    plots: list[dict[str, Any]] = []
    for device in devices:
        boxes: list[list[int]] = []
        notes: list[str] = []
        segments = list(_segments_of(snapshot, device))
        for row, segment in enumerate(segments):
            for address, block in _blocks(segment):
                left = address - segment["address"]
                boxes.append([left, left + block["size"], row, row + 1, stacks.number(block.get("frames", ()))])
                notes.append(f"{block['state']}, {readable(block['size'])} in segment {segment['address']:#x}")
        largest = max((segment["total_size"] for segment in segments), default=0)
        held = sum(segment["total_size"] for segment in segments)
        title = f"Device {device}: {len(segments)} segments, {readable(held)}"
        plots.append(
            {"title": title, "width": largest, "height": len(segments), "boxes": boxes, "notes": notes, "marks": []}
        )
    return _page("Segments of memory", plots, stacks)


class _Stacks:
    """Each stack of frames once, and a number for it."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def number(self, frames: Iterable[Mapping[str, Any]]) -> int:
        lines = [f"{frame['filename']}:{frame['line']}: {frame['name']}" for frame in list(frames)[:_MAX_FRAMES]]
        return self.texts.setdefault("\n".join(lines) or "no stack was recorded", len(self.texts))


def _plot_of_device(
    device: int, trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]], stacks: _Stacks
) -> dict[str, Any]:
    lives = list(_lives(trace, segments))
    places = _places((address, size) for _, _, address, size, _ in lives)
    boxes = [
        [start, end, places[address], places[address] + size, stacks.number(frames)]
        for start, end, address, size, frames in lives
    ]
    return {
        "title": f"Device {device}: {readable(_peak(lives))} in use at most, {len(trace)} actions recorded",
        "width": len(trace),
        "height": max((box[3] for box in boxes), default=0),
        "boxes": boxes,
        "notes": [f"{readable(size)} at {address:#x}" for _, _, address, size, _ in lives],
        "marks": [time for time, entry in enumerate(trace) if entry["action"] == "oom"],
    }


def _lives(
    trace: Sequence[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[int, int, int, int, Any]]:
    """Yield for each allocation when it began and ended, its address, its size and its stack."""
    in_use: dict[int, tuple[int, int, Any]] = {}
    for time, entry in enumerate(trace):
        if entry["action"] == "alloc":
            in_use[entry["addr"]] = time, entry["size"], entry.get("frames", ())
        elif entry["action"] == "free_completed":
            start, size, frames = in_use.pop(entry["addr"], (0, entry["size"], ()))  # older than the record
            yield start, time, entry["addr"], size, frames
    for segment in segments:
        for address, block in _blocks(segment):
            if block["state"].startswith("active") and address not in in_use:
                in_use[address] = 0, block["size"], block.get("frames", ())
    for address, (start, size, frames) in in_use.items():
        yield start, len(trace), address, size, frames


def _places(allocations: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return for each address how many bytes that were ever in use are below it."""
    places: dict[int, int] = {}
    below = covered_to = 0
    for address, size in sorted(allocations):
        covered_to = max(covered_to, address)
        places[address] = below - (covered_to - address)
        grown = max(address + size - covered_to, 0)
        below, covered_to = below + grown, covered_to + grown
    return places


def _peak(lives: Iterable[tuple[int, int, int, int, Any]]) -> int:
    changes = sorted(
        change for start, end, _, size, _ in lives for change in ((start, size), (end, -size)) if start < end
    )
    in_use = most = 0
    for _, change in changes:  # of one time, what is freed comes first
        in_use += change
        most = max(most, in_use)
    return most


def _segments_of(snapshot: Snapshot, device: int) -> Iterator[Mapping[str, Any]]:
    return (segment for segment in snapshot["segments"] if segment.get("device", 0) == device)


def _blocks(segment: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block
        address += block["size"]


def _page(title: str, plots: list[dict[str, Any]], stacks: _Stacks) -> str:
    data = json.dumps({"plots": plots, "stacks": list(stacks.texts)}, separators=(",", ":"))
    # A file name must not end the element that the data is in.
    return _PAGE.replace("$TITLE", title).replace("$DATA", data.replace("</", "<\\/"))
