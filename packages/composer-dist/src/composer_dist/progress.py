"""Progress of each rank in memory that it shares with its launcher.

The launcher makes a `Board` with a slot for each of its ranks, and passes the slot in `COMPOSER_PROGRESS`. A rank
writes its event, batch and time there, without a system call or a lock, and the launcher reads them at any time: the
record of a rank remains when the rank is stuck, suspended or killed. Without a launcher nothing is written.
"""

import contextlib
import mmap
import os
import struct
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from composer_dist import flight_recorder

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from composer_time import Timestamp

__all__ = ["VARIABLE", "PHASES", "PARTS", "Board", "Recorder", "RankProgress", "progress_recorder", "waiting"]

VARIABLE: Final = "COMPOSER_PROGRESS"
"""The variable with a rank's slot and the file of the board, as `3@/path`."""

PHASES: Final = ("start", "data", "train", "optimizer", "callbacks", "evaluation", "checkpoint", "between")
"""What a rank does: before the first `fit`; waiting for data; forward and backward pass; the optimizer's step; hooks;
evaluation or prediction; hooks that save, load, or end the training; and between two calls of `fit`."""

PARTS: Final = (*PHASES, "backward", "collective")
"""The parts into which a rank's time is divided: the phases, where `'train'` ends with the loss; the backward pass, in
which DDP and FSDP wait for other ranks; and waits for other ranks in collectives of `composer_dist` elsewhere in the
training of a batch."""

_SLOT_BYTES: Final = 256
_COLLECTIVE: Final = PARTS.index("collective")
_WITH_WAITS: Final = frozenset(map(PARTS.index, ("data", "train", "optimizer", "callbacks", "backward")))
# The parts of a slot. Most marks write the second part only. Each part is written by one call, which copies it in one
# piece; a reader sees halves at worst for an instant, and reads again.
_HEAD: Final = struct.Struct("<QId")  # PID, rank, time of start
_MARK: Final = struct.Struct("<Qd24sBB6x10d")  # counter, monotonic time, event, phase, part, seconds of each part
_STAMP: Final = struct.Struct("<QQQQ")  # epoch, batch, samples, tokens
_FIRST: Final = struct.Struct("<Q")  # batch at the start of the last `fit`
_FACTS: Final = struct.Struct("<dQdQ")  # loss, its batch; time of the last checkpoint since 1970, its batch
_ASKED: Final = struct.Struct("<I")  # written by the launcher: how often it has asked for the last collectives
_ASKED_AT: Final = _HEAD.size
_MARK_AT: Final = _HEAD.size + _ASKED.size
_STAMP_AT: Final = _MARK_AT + _MARK.size
_FACTS_AT: Final = _STAMP_AT + _STAMP.size
_FIRST_AT: Final = _FACTS_AT + _FACTS.size
assert _FIRST_AT + _FIRST.size <= _SLOT_BYTES

# The work that follows an event, until the next one; and the kind of hooks that run on it.
_AFTER: Final = {
    "before_dataloader": "data",
    "after_dataloader": "train",
    "batch_start": "train",
    "before_train_batch": "train",
    "before_forward": "train",
    "after_forward": "train",
    "before_loss": "train",
    "after_loss": "train",
    "before_backward": "train",
    "after_backward": "train",
    "after_train_batch": "optimizer",
    "before_load": "checkpoint",
    "after_load": "start",
    "init": "start",
    "fit_end": "between",
    "close": "between",
    "eval_after_all": "callbacks",
    "eval_standalone_end": "between",
    "predict_end": "between",
}


def phase_of(event: str, *, is_inside: bool) -> str:
    """Return the phase while the hooks of an event run, or in the work that follows it."""
    # The last save, and the waits for uploads, are in `fit_end` and `close`.
    if is_inside and (event.endswith("_checkpoint") or event in ("fit_end", "close")):
        return "checkpoint"
    if not is_inside and event in _AFTER:
        return _AFTER[event]
    if event.startswith(("eval_", "predict_")):
        return "evaluation"
    return "callbacks"


def part_of(event: str, *, is_inside: bool) -> str:
    """Return the part to which the same time counts."""
    if event == "before_backward" and not is_inside:
        return "backward"
    return phase_of(event, is_inside=is_inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """The recorded progress of a rank.

    Attributes:
        rank: The global rank.
        pid: The process that trains; 0 if none has begun.
        started_s: When it began, in seconds since 1970.
        counter: Grows with each mark; odd while hooks of an event run.
        time_s: Time of the last mark on this machine's monotonic clock.
        event: The last event, such as `'before_forward'`.
        phase: One of `PHASES`.
        part: One of `PARTS`.
        seconds: The time spent in each of `PARTS`, up to the last mark.
        epoch: Epochs done.
        batch: Batches done.
        first_batch: Batches done at the start of the last `fit`, as by a resumed run.
        samples: Samples trained on, by all ranks.
        tokens: Tokens trained on, by all ranks.
        loss: The last loss that the run recorded, `None` before the first. Recorded on rank 0 only.
        loss_batch: The batch of that loss.
        checkpoint_s: When the last checkpoint was complete, in seconds since 1970; `None` before the first.
        checkpoint_batch: The batch of that checkpoint.
    """

    rank: int
    pid: int
    started_s: float
    counter: int
    time_s: float
    event: str
    phase: str
    part: str
    seconds: "Mapping[str, float]"
    epoch: int
    batch: int
    first_batch: int
    samples: int
    tokens: int
    loss: float | None
    loss_batch: int
    checkpoint_s: float | None
    checkpoint_batch: int

    @property
    def is_inside_event(self) -> bool:
        """Return whether hooks of the event run, and not the work that follows it."""
        return self.counter % 2 == 1


class Board:
    """The launcher's memory with the progress of its ranks, one slot for each.

    Args:
        num_ranks: The number of slots.

    Example:
        >>> board = Board(2)
        >>> recorder = Recorder(board.slot(1), rank=1)
        >>> recorder.enter("batch_end")
        >>> board.read(1).event, board.read(1).phase, board.read(0).pid
        ('batch_end', 'callbacks', 0)
        >>> board.close()
    """

    def __init__(self, num_ranks: int) -> None:
        size = max(1, num_ranks) * _SLOT_BYTES
        if hasattr(os, "memfd_create") and Path("/proc/self/fd").exists():
            # Without a name: nothing is left behind if the launcher is killed, and no disk can block a write.
            self._file = os.memfd_create("composer-progress")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="composer_progress_")
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self.num_ranks = num_ranks

    def slot(self, number: int) -> str:
        """Return the value of `COMPOSER_PROGRESS` for a slot."""
        return f"{number}@{self.path}"

    def read(self, number: int) -> RankProgress:
        """Return the progress in a slot."""
        first = number * _SLOT_BYTES
        raw = self._memory[first : first + _SLOT_BYTES]
        for _ in range(3):  # two equal copies have no half-written part
            again = self._memory[first : first + _SLOT_BYTES]
            if again == raw:
                break
            raw = again
        pid, rank, started_s = _HEAD.unpack_from(raw)
        counter, time_s, event, phase, part, *seconds = _MARK.unpack_from(raw, _MARK_AT)
        epoch, batch, samples, tokens = _STAMP.unpack_from(raw, _STAMP_AT)
        loss, loss_batch, checkpoint_s, checkpoint_batch = _FACTS.unpack_from(raw, _FACTS_AT)
        return RankProgress(
            rank=rank,
            pid=pid,
            started_s=started_s,
            counter=counter,
            time_s=time_s,
            event=event.rstrip(b"\0").decode(errors="replace"),
            phase=PHASES[phase % len(PHASES)],
            part=PARTS[part % len(PARTS)],
            seconds=dict(zip(PARTS, seconds, strict=True)),
            epoch=epoch,
            batch=batch,
            first_batch=_FIRST.unpack_from(raw, _FIRST_AT)[0],
            samples=samples,
            tokens=tokens,
            loss=loss if loss_batch or loss else None,
            loss_batch=loss_batch,
            checkpoint_s=checkpoint_s or None,
            checkpoint_batch=checkpoint_batch,
        )

    def ask(self, number: int) -> int:
        """Ask the rank in a slot for its last collectives, and return the number of the request."""
        at = number * _SLOT_BYTES + _ASKED_AT
        asked: int = _ASKED.unpack_from(self._memory, at)[0] + 1
        _ASKED.pack_into(self._memory, at, asked)
        return asked

    def read_all(self) -> list[RankProgress]:
        """Return the progress of the ranks that have begun to record it."""
        return [progress for progress in map(self.read, range(self.num_ranks)) if progress.pid]

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self._file)
        if not self.path.startswith("/proc/"):
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class Recorder:
    """Writer of one rank's progress, for its launcher.

    Args:
        slot: The value of `COMPOSER_PROGRESS`, or `None` for memory of this process only.
        rank: The global rank.

    Raises:
        OSError: If the board cannot be opened, as in a container that does not share the launcher's processes.
        ValueError: If another process of the rank has taken the slot.
    """

    def __init__(self, slot: str | None, rank: int) -> None:
        number = 0
        if not slot:
            self._memory = mmap.mmap(-1, _SLOT_BYTES)
        else:
            text, _, path = slot.partition("@")
            number = int(text)
            file = os.open(path, os.O_RDWR)
            try:
                self._memory = mmap.mmap(file, (number + 1) * _SLOT_BYTES)
            finally:
                os.close(file)
        first = number * _SLOT_BYTES
        owner: int = _HEAD.unpack_from(self._memory, first)[0]
        if owner not in (0, os.getpid()) and _is_alive(owner):
            raise ValueError(f"{VARIABLE}={slot!r} belongs to process {owner}. A rank has one process that trains.")
        _HEAD.pack_into(self._memory, first, os.getpid(), rank, time.time())
        self._mark_at, self._stamp_at = first + _MARK_AT, first + _STAMP_AT
        self._facts_at, self._first_at, self._asked_at = first + _FACTS_AT, first + _FIRST_AT, first + _ASKED_AT
        self._counter = 0
        self._time_s = time.monotonic()
        self._phase = self._part = 0
        self._seconds = [0.0] * len(PARTS)
        self._thread = threading.get_ident()
        self._num_waits, self._waits_since_s = 0, 0.0
        self._stamp: object = None
        self._event = b""
        self._events: dict[str, tuple[bytes, int, int, int]] = {}
        self._write(b"", 0, 0)

    def enter(self, event: str, stamp: "Timestamp | None" = None) -> None:
        """Record that the hooks of an event begin, at a time in training."""
        if stamp is not self._stamp and stamp is not None:  # the loop replaces the timestamp when it advances
            self._stamp = stamp
            _STAMP.pack_into(
                self._memory,
                self._stamp_at,
                stamp.num_epochs,
                stamp.num_batches,
                int(stamp.num_samples),
                stamp.num_tokens,
            )
        if event == "fit_start" and stamp is not None:
            _FIRST.pack_into(self._memory, self._first_at, stamp.num_batches)
        known = self._events.get(event)
        if known is None:
            known = self._events[event] = (
                event.encode()[:24],
                PHASES.index(phase_of(event, is_inside=True)),
                PHASES.index(phase_of(event, is_inside=False)),
                PARTS.index(part_of(event, is_inside=False)),
            )
        self._counter += 1 + self._counter % 2  # odd, also if the last event was not left
        self._write(known[0], known[1], known[1])

    def leave(self, event: str) -> None:
        """Record that the hooks of an event have ended, and the work that follows begins."""
        known = self._events[event]
        self._counter += self._counter % 2
        self._write(known[0], known[2], known[3])

    @contextlib.contextmanager
    def closing(self) -> "Generator[None]":
        """Return a context that records the end of callbacks and loggers, if it follows a training without errors."""
        if PHASES[self._phase] != "between":
            yield
            return
        self.enter("close")
        try:
            yield
        finally:
            self.leave("close")

    def note_progress(self) -> None:
        """Record progress without a new event, as in a wait for uploads, which may take long."""
        if threading.get_ident() == self._thread:
            self._counter += 2
            self._write(self._event, self._phase, self._part)

    def begin_wait(self) -> None:
        """Count the time until `end_wait` as a wait for other ranks; such periods may be nested."""
        if threading.get_ident() == self._thread:  # not that of a thread which saves beside the training
            self._num_waits += 1
            if self._num_waits == 1:
                self._waits_since_s = time.monotonic()

    def end_wait(self) -> None:
        """End a period of `begin_wait`."""
        if threading.get_ident() == self._thread and self._num_waits:
            self._num_waits -= 1
            if self._num_waits == 0 and self._part in _WITH_WAITS:
                waited_s = time.monotonic() - self._waits_since_s
                self._seconds[self._part] -= waited_s  # to which the next mark adds the whole time
                self._seconds[_COLLECTIVE] += waited_s

    def note_loss(self, loss: float, batch: int) -> None:
        """Record a loss whose value is on the host."""
        _, _, checkpoint_s, checkpoint_batch = _FACTS.unpack_from(self._memory, self._facts_at)
        _FACTS.pack_into(self._memory, self._facts_at, loss, batch, checkpoint_s, checkpoint_batch)

    def note_checkpoint(self, batch: int) -> None:
        """Record that a checkpoint of a batch is complete."""
        loss, loss_batch, _, _ = _FACTS.unpack_from(self._memory, self._facts_at)
        _FACTS.pack_into(self._memory, self._facts_at, loss, loss_batch, time.time(), batch)

    def note_folder(self, folder: Path) -> None:
        """Tell the launcher the folder of the run, in a file beside the rank's stacks."""
        stacks = os.environ.get("COMPOSER_STACK_FILE")
        if stacks:
            with contextlib.suppress(OSError):  # the report is also among the logs
                unfinished = Path(stacks).with_name("run_folder.unfinished")
                unfinished.write_text(str(folder.absolute()), encoding="utf-8")
                unfinished.replace(unfinished.with_name("run_folder"))  # atomic, as the launcher may read it meanwhile

    @property
    def asked(self) -> int:
        """The number of times that the launcher has asked for the last collectives."""
        asked: int = _ASKED.unpack_from(self._memory, self._asked_at)[0]
        return asked

    @property
    def position(self) -> tuple[int, str, str, float]:
        """The counter, the event, the phase, and the monotonic time of the last mark."""
        return self._counter, self._event.decode(), PHASES[self._phase], self._time_s

    def _write(self, event: bytes, phase: int, part: int) -> None:
        now = time.monotonic()
        seconds = self._seconds
        seconds[self._part] += now - self._time_s
        self._phase, self._part, self._time_s, self._event = phase, part, now, event
        _MARK.pack_into(self._memory, self._mark_at, self._counter, now, event, phase, part, *seconds)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_recorder: Recorder | None = None


def progress_recorder() -> Recorder | None:
    """Return this process's recorder for its launcher, or `None` without a reader."""
    global _recorder
    slot = os.environ.get(VARIABLE)
    if _recorder is None and (slot or os.environ.get(flight_recorder.HANG_TIMEOUT)):
        try:
            _recorder = Recorder(slot, int(os.environ.get("RANK", "0")))
        except (OSError, ValueError):  # another process of this rank trains, or the launcher's memory is out of reach
            return None
        stacks = os.environ.get("COMPOSER_STACK_FILE") if slot else None
        flight_recorder.start(_recorder, Path(stacks).parent if stacks else None)
    return _recorder


class _Waiting:
    """A context manager that counts its time as a wait for other ranks."""

    def __enter__(self) -> None:
        if _recorder is not None:
            _recorder.begin_wait()

    def __exit__(self, *_: object) -> None:
        if _recorder is not None:
            _recorder.end_wait()


waiting: Final = _Waiting()
"""A context manager for collectives that may be nested: its time counts as a wait for other ranks."""
