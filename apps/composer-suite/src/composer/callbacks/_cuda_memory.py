"""Recordings of the CUDA allocator, as files that can be opened offline."""

from __future__ import annotations

import json
import logging
import os
import pickle
import posixpath
import warnings
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final
from xml.sax.saxutils import escape

import torch
from torch.cuda import _memory_viz

from composer_checkpoint.remote.logger import RemoteUploaderDownloader, maybe_create_remote_uploader_downloader_from_uri
from composer_checkpoint.save_folder import ensure_folder_is_empty
from composer_checkpoint.stores.base import parse_uri
from composer_events.arguments import check_counts, check_flags, to_time
from composer_events.callback import Callback
from composer_events.formatting import OF_TIME, check_placeholders, format_name_with_dist_and_time
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = [
    "MemoryRecorder",
    "MemorySnapshot",
    "OOMObserver",
    "Snapshot",
    "SnapshotFileNameConfig",
    "draw_flamegraph",
    "segment_page",
    "timeline_page",
]

_log = logging.getLogger(__name__)

Snapshot = Mapping[str, Any]
"""The allocator's segments with their blocks, and its history for each device."""


class MemoryRecorder(Callback):
    """Base class of callbacks that record the history of the CUDA allocator, and write it to files."""

    _title: ClassVar[str]

    def __init__(
        self, max_entries: int, folder: str, filename: str, remote_file_name: str | None, overwrite: bool
    ) -> None:
        check_counts(max_entries=max_entries)
        check_placeholders(OF_TIME, folder=folder, filename=filename, remote_file_name=remote_file_name)
        check_flags(overwrite=overwrite)
        self.max_entries = max_entries
        self.folder, self.filename, self.remote_file_name = folder, filename, remote_file_name
        self.overwrite = overwrite
        self._enabled = False
        self._uploaded: set[str] = set()

    def init(self, state: State, logger: Logger) -> None:
        """Create the folder and, for a URI, add an uploader. Warn if training does not run on a CUDA device.

        Every rank must call this.

        Raises:
            FileExistsError: If the folder contains files and `overwrite` is false.
        """
        # Not where the parameters are: FSDP and DeepSpeed move them to the device later, or never.
        where = state.device.torch_device.type
        self._enabled = where == "cuda"
        if not self._enabled:
            warnings.warn(
                f"The {self._title} only works on CUDA devices, but the model is on {where}.",
                UserWarning,
                stacklevel=2,
            )
            return
        folder = self._formatted(self.folder, state)
        os.makedirs(folder, exist_ok=True)
        if not self.overwrite:
            ensure_folder_is_empty(folder)
        if self.remote_file_name is not None:
            _add_uploader(self.remote_file_name, state, logger)

    def _record(self) -> None:
        torch.cuda.memory._record_memory_history("all", max_entries=self.max_entries)

    def _stop(self) -> None:
        self._enabled = False
        torch.cuda.memory._record_memory_history(None)

    @abstractmethod
    def _files(self, path: str, snapshot: Snapshot) -> dict[str, Callable[[], bytes]]:
        """Return, by path, functions that return the content of a file."""

    def _save(self, state: State, logger: Logger) -> None:
        """Write and upload files independently of each other. Failures are logged, and training continues."""
        try:
            snapshot = torch.cuda.memory._snapshot()
        except Exception:  # a monitor must neither end training nor hide an out-of-memory error
            _log.exception("No snapshot of the memory could be taken.")
            return
        path = os.path.join(self._formatted(self.folder, state), self._formatted(self.filename, state))
        for name, make in self._files(path, snapshot).items():
            try:
                Path(name).write_bytes(make())
                if self.remote_file_name is not None:
                    remote_folder = parse_uri(self._formatted(self.remote_file_name, state)).path
                    remote_name = posixpath.join(remote_folder.lstrip("/"), os.path.basename(name))
                    is_own = remote_name in self._uploaded  # after a second out-of-memory error, the newer file counts
                    logger.upload_file(remote_name, name, overwrite=self.overwrite or is_own)
                    self._uploaded.add(remote_name)
            except Exception:  # a monitor must not end training
                _log.exception("%s could not be written or uploaded.", name)

    def _formatted(self, name: str, state: State) -> str:
        return format_name_with_dist_and_time(name, state.run_name, state.timestamp)


def _add_uploader(address: str, state: State, logger: Logger) -> None:
    """Add an uploader for the object store of a URI, unless a logger already uploads there."""
    backend, bucket, _ = parse_uri(address)
    places = logger.destinations
    if any(isinstance(place, RemoteUploaderDownloader) and place.serves(backend, bucket) for place in places):
        return
    uploader = maybe_create_remote_uploader_downloader_from_uri(address, [])
    if uploader is not None:
        logger.destinations = (*places, uploader)
        state.callbacks.append(uploader)
        uploader.init(state, logger)  # the engine has already run `init` of the loggers


_MAX_FRAMES: Final = 24  # innermost frames of a stack, since the outer ones rarely differ


def timeline_page(snapshot: Snapshot) -> str:
    """Return a page with each allocation as a box over time and address.

    Time is counted in actions of the allocator. Address ranges that were never in use are left out. Red lines mark
    out-of-memory errors.
    """
    stacks: dict[str, int] = {}
    plots = [
        _plot_of_device(device, trace, list(_segments_of(snapshot, device)), stacks)
        for device, trace in enumerate(snapshot["device_traces"])
        if trace
    ]
    return _page("Memory in use", plots, stacks)


def segment_page(snapshot: Snapshot) -> str:
    """Return a page with a row for each segment, with its current blocks."""
    stacks: dict[str, int] = {}
    devices = sorted({segment.get("device", 0) for segment in snapshot["segments"]})
    plots: list[dict[str, Any]] = []
    for device in devices:
        boxes: list[list[int]] = []
        notes: list[str] = []
        segments = list(_segments_of(snapshot, device))
        for row, segment in enumerate(segments):
            for address, block in _blocks(segment):
                left = address - segment["address"]
                boxes.append([left, left + block["size"], row, row + 1, _number(stacks, block.get("frames", ()))])
                notes.append(f"{block['state']}, {readable(block['size'])} in segment {segment['address']:#x}")
        largest = max((segment["total_size"] for segment in segments), default=0)
        held = sum(segment["total_size"] for segment in segments)
        title = f"Device {device}: {len(segments)} segments, {readable(held)}"
        plots.append(
            {"title": title, "width": largest, "height": len(segments), "boxes": boxes, "notes": notes, "marks": []}
        )
    return _page("Segments of memory", plots, stacks)


def _number(stacks: dict[str, int], frames: Iterable[Mapping[str, Any]]) -> int:
    """Return the index of a stack. The page stores each distinct stack once."""
    lines = [f"{frame['filename']}:{frame['line']}: {frame['name']}" for frame in list(frames)[:_MAX_FRAMES]]
    return stacks.setdefault("\n".join(lines) or "no stack was recorded", len(stacks))


def _plot_of_device(
    device: int, trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]], stacks: dict[str, int]
) -> dict[str, Any]:
    lives = list(_lives(trace, segments))
    places = _places((address, size) for _, _, address, size, _ in lives)
    boxes = [
        [start, end, places[address], places[address] + size, _number(stacks, frames)]
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
    """Yield the start, end, address, size and stack of each allocation."""
    in_use: dict[int, tuple[int, int, Any]] = {}
    for time, entry in enumerate(trace):
        if entry["action"] == "alloc":
            in_use[entry["addr"]] = time, entry["size"], entry.get("frames", ())
        # Not "free_requested": a block used on another stream stays in use until that stream has finished with it.
        elif entry["action"] == "free_completed":
            start, size, frames = in_use.pop(entry["addr"], (0, entry["size"], ()))  # allocated before the record began
            yield start, time, entry["addr"], size, frames
    # Blocks in use that the trace does not contain were allocated before the record began.
    for segment in segments:
        for address, block in _blocks(segment):
            if block["state"].startswith("active") and address not in in_use:
                in_use[address] = 0, block["size"], block.get("frames", ())
    for address, (start, size, frames) in in_use.items():
        yield start, len(trace), address, size, frames


def _places(allocations: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Map each address to the number of bytes below it that were ever in use."""
    places: dict[int, int] = {}
    below = covered_to = 0
    for address, size in sorted(allocations):
        # Allocations at different times may overlap, so `address` may be below `covered_to`.
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
    for _, change in changes:  # sorted, so frees precede allocations at the same time
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


def _page(title: str, plots: list[dict[str, Any]], stacks: dict[str, int]) -> str:
    data = json.dumps({"plots": plots, "stacks": list(stacks)}, separators=(",", ":"))
    page = files("composer.callbacks").joinpath("memory_page.html").read_text()
    # A file name with `</script>` must not end the element that contains the data.
    return page.replace("$TITLE", title).replace("$DATA", data.replace("</", "<\\/"))


_WIDTH: Final = 1200
_ROW_HEIGHT: Final = 16
_LETTER_WIDTH: Final = 7  # of the monospace font, to fit labels without measuring them
_NARROWEST: Final = 0.1  # pixels; narrower boxes are invisible and would enlarge the file


@dataclass(slots=True)
class _Frame:
    name: str
    size: int = 0
    inner: dict[str, _Frame] = field(default_factory=dict)


def draw_flamegraph(folded: str) -> str:
    """Return a flame graph as SVG, of lines such as `outermost;inner;innermost 4096`: a stack and its size in bytes.

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
    """Yield each frame with its left end, its row from the bottom and its width, without recursion."""
    waiting = [(root, left, depth)]  # stacks may be deeper than Python's recursion limit
    while waiting:
        frame, left, depth = waiting.pop()
        if frame.size * scale < _NARROWEST:
            continue
        yield frame, left, depth, frame.size * scale
        for inner in sorted(frame.inner.values(), key=lambda each: each.name):
            waiting.append((inner, left, depth + 1))
            left += inner.size * scale


def _draw(frame: _Frame, left: float, top: int, width: float) -> str:
    hue = zlib.crc32(frame.name.encode()) % 50  # between red and yellow, the same for each occurrence of a name
    num_letters = int(width / _LETTER_WIDTH) - 1
    label = frame.name if len(frame.name) <= num_letters else frame.name[: max(num_letters - 1, 0)] + "…"
    text = f'<text x="{left + 3:.1f}" y="{top + 12}">{escape(label)}</text>' if num_letters >= 3 else ""
    return (
        f"<g><title>{escape(frame.name)}: {readable(frame.size)}</title>"
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW_HEIGHT - 1}" fill="hsl({hue},80%,65%)"/>'
        f"{text}</g>"
    )


def readable(size_bytes: int) -> str:
    """Format a size in the largest unit in which it is 1 or more.

    >>> readable(1536), readable(17)
    ('1.5 KiB', '17 B')
    """
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{size_bytes} B"


class MemorySnapshot(MemoryRecorder):
    """Record the actions of the CUDA allocator over a few batches, and save them as files.

    `<filename>.html` can be opened in any browser, offline. `<filename>.pickle` is for
    `python -m torch.cuda._memory_viz` and PyTorch's page; only open files from a trusted source. On other devices, the
    callback only warns. Errors in writing files are logged and do not end training.

    Args:
        skip_batches: Number of batches to skip first.
        interval: Duration of the recording: batches, or a time.
        max_entries: Number of the last actions to keep.
        folder: Local folder, with the placeholders of run and ranks.
        filename: Name of the files without extension, with placeholders for run, ranks and time.
        remote_file_name: Folder of the files for loggers that keep files, or a URI to upload to. `None` uploads
            nothing.
        overwrite: Whether the folder may contain files, and the object store may contain files of these names.

    Raises:
        ValueError: If a number is negative.
        FileExistsError: At the start, if the folder contains files.

    Example:
        >>> snapshot = MemorySnapshot(skip_batches=2, interval='1ba')
    """

    _title = "memory snapshot"

    def __init__(
        self,
        skip_batches: int = 1,
        interval: int | str | Time[int] = "3ba",
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.memory_snapshot",
        remote_file_name: str | None = "{run_name}/torch_memory_traces",
        overwrite: bool = False,
    ) -> None:
        super().__init__(max_entries, folder, filename, remote_file_name, overwrite)
        check_counts(0, skip_batches=skip_batches)
        self.skip_batches = skip_batches
        self.interval = to_time("interval", interval, TimeUnit.BATCH)
        if int(self.interval) < 1:
            raise ValueError(f"interval={interval!r} must be how long to record, such as '3ba'.")
        self._batches_left_to_skip = skip_batches
        self._end: Time[int] | None = None

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start recording after the skipped batches."""
        if not self._enabled or self._end is not None:
            return
        if self._batches_left_to_skip > 0:
            self._batches_left_to_skip -= 1
            return
        self._end = state.timestamp.get(self.interval.unit) + self.interval
        self._record()  # only now, since recording slows down each allocation

    def batch_end(self, state: State, logger: Logger) -> None:
        """Save the record when the interval is over."""
        if self._enabled and self._end is not None and state.timestamp.get(self.interval.unit) >= self._end:
            self._save(state, logger)
            self._stop()

    def close(self, state: State, logger: Logger) -> None:
        """Stop recording."""
        if self._enabled and self._end is not None:
            self._stop()

    def _files(self, path: str, snapshot: Snapshot) -> dict[str, Callable[[], bytes]]:
        if not any(snapshot["device_traces"]):
            _log.info("Nothing was allocated while memory was recorded, so no snapshot is kept.")
            return {}
        return {
            f"{path}.pickle": lambda: pickle.dumps(snapshot),
            f"{path}.html": lambda: timeline_page(snapshot).encode(),
        }


# Only for its text output, since its pages load scripts from the network.


@dataclass(frozen=True, slots=True)
class SnapshotFileNameConfig:
    """Names of the files.

    Attributes:
        snapshot_file: The snapshot, for `python -m torch.cuda._memory_viz` and PyTorch's page.
        trace_plot_file: A page with each allocation as a box over time.
        segment_plot_file: A page with the blocks of each segment.
        segment_flamegraph_file: A flame graph of the code that holds the bytes of each segment.
        memory_flamegraph_file: A flame graph of the code that holds all bytes.
    """

    snapshot_file: str
    trace_plot_file: str
    segment_plot_file: str
    segment_flamegraph_file: str
    memory_flamegraph_file: str

    @classmethod
    def from_file_name(cls, filename: str) -> SnapshotFileNameConfig:
        """Return names with a common prefix.

        Example:
            >>> SnapshotFileNameConfig.from_file_name('rank0_oom').snapshot_file
            'rank0_oom_snapshot.pickle'
        """
        return cls(
            snapshot_file=f"{filename}_snapshot.pickle",
            trace_plot_file=f"{filename}_trace_plot.html",
            segment_plot_file=f"{filename}_segment_plot.html",
            segment_flamegraph_file=f"{filename}_segment_flamegraph.svg",
            memory_flamegraph_file=f"{filename}_memory_flamegraph.svg",
        )

    def list_filenames(self) -> list[str]:
        """Return all names."""
        return list(astuple(self))


class OOMObserver(MemoryRecorder):
    """Save the memory in use when a CUDA device runs out of memory, as files that can be opened offline.

    The snapshot and four plots, see `SnapshotFileNameConfig`, are written before the error is raised, so they exist
    even if it ends the run. Files are written independently of each other, and errors are logged. On other devices, the
    callback only warns. The allocator's history is recorded from the start, which slightly slows down each allocation.

    Args:
        max_entries: Number of the allocator's last actions to keep.
        folder: Local folder, with the placeholders of run and ranks.
        filename: Prefix of the files' names, with placeholders for run, ranks and time.
        remote_file_name: Folder of the files for loggers that keep files, or a URI to upload to. `None` uploads
            nothing.
        overwrite: Whether the folder may contain files, and the object store may contain files of these names.

    Raises:
        ValueError: If `max_entries` is less than 1.
        FileExistsError: At the start, if the folder contains files.

    Example:
        >>> observer = OOMObserver(folder='traces/{run_name}', remote_file_name=None)
    """

    _title = "oom observer"

    def __init__(
        self,
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}_oom",
        remote_file_name: str | None = "{run_name}/oom_traces/rank{rank}_oom",
        overwrite: bool = False,
    ) -> None:
        super().__init__(max_entries, folder, filename, remote_file_name, overwrite)

    def init(self, state: State, logger: Logger) -> None:
        """Start recording, if training runs on a CUDA device."""
        super().init(state, logger)
        if not self._enabled:
            return
        # PyTorch keeps the observer until the process ends, so it must not keep the run alive.
        observer, of_state, of_logger = weakref.ref(self), weakref.ref(state), weakref.ref(logger)

        def observe(device: int, asked_for: int, total: int, free: int) -> None:
            alive, its_state, its_logger = observer(), of_state(), of_logger()
            if alive is not None and its_state is not None and its_logger is not None:
                alive.keep_snapshot(its_state, its_logger)

        torch._C._cuda_attach_out_of_memory_observer(observe)  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
        self._record()

    def close(self, state: State, logger: Logger) -> None:
        """Stop recording."""
        if self._enabled:
            self._stop()

    def keep_snapshot(self, state: State, logger: Logger) -> None:
        """Write and upload the current memory usage, unless the callback is closed."""
        if self._enabled:
            self._save(state, logger)

    def _files(self, path: str, snapshot: Snapshot) -> dict[str, Callable[[], bytes]]:
        names = SnapshotFileNameConfig.from_file_name(path)
        return {
            names.snapshot_file: lambda: pickle.dumps(snapshot),
            names.trace_plot_file: lambda: timeline_page(snapshot).encode(),
            names.segment_plot_file: lambda: segment_page(snapshot).encode(),
            names.segment_flamegraph_file: lambda: _memory_viz.segments(snapshot, draw_flamegraph).encode(),
            names.memory_flamegraph_file: lambda: _memory_viz.memory(snapshot, draw_flamegraph).encode(),
        }
