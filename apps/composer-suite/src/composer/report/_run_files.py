"""Files of a run, written without waiting for pending device computations."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from logging import DEBUG, WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.loggers._logged_values import Snapshot, as_number
from composer.loggers._text_output import KeptFile, to_plain

if TYPE_CHECKING:
    from composer_time import Timestamp

__all__ = ["FactFiles", "MetricLines", "keep_lines"]
_PLAIN = frozenset({bool, int, float})


class MetricLines:
    """File with one line per time in training.

    Args:
        path: The file.
        is_continued: Whether to append to an existing file.

    Attributes:
        num_lines: The number of lines written.
    """

    def __init__(self, path: Path, *, is_continued: bool) -> None:
        self.num_lines = 0
        self._file = KeptFile(path, -1, is_continued)
        self._pending: deque[_Line] = deque()

    @property
    def num_pending(self) -> int:
        """The number of pending lines."""
        return len(self._pending)

    def add(self, stamp: Timestamp, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Add values; those on a device stay pending until their copies have arrived."""
        if step is not None and type(step) is not int:
            with suppress(Exception):  # such as a NumPy number or a `Time`; a foreign object may raise anything
                step = int(step)
            step = step if type(step) is int else None
        last = self._pending[-1] if self._pending else None
        if last is None or not last.has_room(stamp, step, metrics):
            last = _Line(stamp, step)
            self._pending.append(last)
        if _PLAIN.issuperset(map(type, metrics.values())):  # fast path for the most common case
            last.known |= metrics
            return
        on_devices: dict[str, Any] = {}
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                on_devices[name] = value
            elif (number := as_number(value)) is not None:
                last.known[name] = number
        if on_devices:
            last.coming.append(Snapshot(on_devices))

    def write(self, *, waits: bool) -> None:
        """Write the leading lines whose values are available, or wait for all of them."""
        while self._pending and (waits or all(snapshot.is_ready() for snapshot in self._pending[0].coming)):
            line = self._pending.popleft().as_json()
            if line["metrics"]:  # empty if all values were text or on a failed device
                self._file.write(json.dumps(line).encode() + b"\n")
                self.num_lines += 1

    def flush(self) -> None:
        """Write the lines whose values are available, so that readers of the file see them."""
        self.write(waits=False)
        self._file.flush()

    def sync(self) -> None:
        """Write everything, and sync the file to the disk."""
        self.write(waits=True)
        self._file.sync()

    def keep(self, num_lines: int) -> None:
        """Truncate the file to its first `num_lines` lines."""
        self._file.close()
        try:
            self.num_lines = keep_lines(self._file.path, num_lines)
        except OSError as error:  # a full disk must not end the training
            _log.warning("%s keeps lines that the resumed run repeats: %s", self._file.path, error)
        self._file = KeptFile(self._file.path, -1, is_continued=True)

    def close(self) -> None:
        """Write everything, and close the file."""
        self.sync()
        self._file.close()


@dataclass(slots=True)
class _Line:
    stamp: Timestamp
    step: int | None
    known: dict[str, Any] = field(default_factory=dict[str, Any])
    coming: list[Snapshot] = field(default_factory=list[Snapshot])

    def has_room(self, stamp: Timestamp, step: int | None, metrics: Mapping[str, Any]) -> bool:
        # Identity suffices, and is fast: the loop creates a new timestamp whenever the time changes.
        if self.stamp is not stamp or self.step != step or not self.known.keys().isdisjoint(metrics):
            return False
        return all(snapshot.values.keys().isdisjoint(metrics) for snapshot in self.coming)

    def as_json(self) -> dict[str, Any]:
        known, stamp = self.known, self.stamp
        for snapshot in self.coming:
            try:
                arrived = snapshot.read()
            except RuntimeError:  # a failed device must not cost the other values
                continue
            known |= arrived
        values = {str(name): number for name, value in known.items() if (number := _plain(value)) is not None}
        return {
            "batch": stamp.num_batches if self.step is None else self.step,
            "epoch": stamp.num_epochs,
            "sample": stamp.num_samples,
            "token": stamp.num_tokens,
            "time_s": stamp.total_wct.total_seconds(),
            "metrics": values,
        }


def _plain(value: Any) -> float | str | None:
    """Return a number for JSON, or `None` for other values."""
    number = as_number(value)
    # JSON has neither NaN nor infinities.
    return number if number is None or math.isfinite(number) else str(number)


_log = getLogger(__name__)


class FactFiles:
    """JSON files in a folder. Failed writes are logged, the first one as a warning.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[str, str] = {}
        self._has_warned = False

    def write(self, name: str, value: Any) -> None:
        """Replace a file if its content has changed."""
        text = json.dumps(to_plain(value), indent=1)
        if self._texts.get(name) == text:  # as in most flushes, since facts rarely change
            return
        path, unfinished = self._folder / name, self._folder / f".{name}.unfinished"
        try:
            # Replaced atomically, so that a reader or a kill never sees half a file.
            unfinished.write_text(text)
            unfinished.replace(path)
            self._texts[name] = text
        except OSError as error:  # a full disk must not end the training, nor fill the log with warnings
            _log.log(DEBUG if self._has_warned else WARNING, "%s could not be written: %s", path, error)
            self._has_warned = True


def keep_lines(path: Path, num_lines: int) -> int:
    """Truncate a file to its first complete lines, and return their number.

    The file is replaced when the new one is complete.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    num_kept = 0
    # In binary mode: a kill may have cut the last line within a character.
    with path.open("rb") as lines, unfinished.open("wb") as kept:
        for line in islice(lines, num_lines):
            if line.endswith(b"\n"):
                kept.write(line)
                num_kept += 1
    unfinished.replace(path)
    return num_kept
