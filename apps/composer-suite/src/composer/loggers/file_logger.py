"""Log file per rank, with all logged values and the console output of the process."""

import io
import logging
import os
import re
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from composer.loggers._service_queue import Snapshot, warn_logging_problem
from composer.loggers._text_output import table_as_json
from composer_events.arguments import check_counts, check_flags, check_numbers, overrides
from composer_events.formatting import check_placeholders, format_name_with_dist
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination, format_log_data_value
from composer_events.state import State

__all__ = ["FileLogger", "KeptFile"]

_log = logging.getLogger(__name__)


class FileLogger(LoggerDestination):
    """Logger that writes one line per logged value to a file, and copies the console output there.

    Each rank writes its own file, in the order of logging. If a device is still computing a value, its line and the
    lines after it are written later; the logger does not synchronize. If the disk is full, text is kept in memory and
    written later, with one warning.

    Args:
        filename: The path, with the placeholders `{run_name}`, `{rank}`, `{local_rank}`, `{node_rank}`, `{world_size}`
            and `{local_world_size}`.
        remote_file_name: The name of the file for loggers that upload it, such as a `RemoteUploaderDownloader`, with
            the same placeholders. By default `filename`.
        capture_stdout: Whether to copy `sys.stdout`, from construction until the Trainer is closed.
        capture_stderr: Whether to copy `sys.stderr`.
        buffer_size: The number of bytes to buffer: 1 for line buffering, 0 for none, less than 0 for the default of the
            system.
        log_traces: Whether to also write the actions of algorithms.
        flush_interval: The number of batches, or epochs, between syncs of the file to the disk and uploads. The file is
            also synced before each epoch and evaluation and at the end.
        overwrite: Whether an existing file may be replaced. A resumed run (`Trainer(autoresume=True)`) appends to it.

    Attributes:
        is_resuming: Whether to append to an existing file. The Trainer sets it.

    Raises:
        ValueError: If `flush_interval` is less than 1.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] = "{run_name}/logs-rank{rank}.txt",
        remote_file_name: str | os.PathLike[str] | None = None,
        *,
        capture_stdout: bool = True,
        capture_stderr: bool = True,
        buffer_size: int = 1,
        log_traces: bool = True,
        flush_interval: int = 100,
        overwrite: bool = False,
    ) -> None:
        check_placeholders(filename=filename, remote_file_name=remote_file_name)
        check_counts(flush_interval=flush_interval)
        check_numbers(buffer_size=buffer_size)
        check_flags(overwrite=overwrite)
        self.filename_format = os.fspath(filename)
        self.remote_file_name_format = self.filename_format if remote_file_name is None else os.fspath(remote_file_name)
        self.buffer_size, self.flush_interval = buffer_size, flush_interval
        self.should_log_traces, self.overwrite, self.is_resuming = log_traces, overwrite, False
        self._run_name: str | None = None
        self._file: KeptFile | None = None
        self._pid = os.getpid()
        self._lock = RLock()  # several threads print, and a write may itself print in the same thread
        self._pending: deque[_Entry] = deque()
        self._is_writing = False
        self._is_at_line_start = True
        self._state: State | None = None  # set by `close`, for a last upload in `post_close`
        self._is_uploaded_whole = False
        self._captured = [name for name, wanted in (("stdout", capture_stdout), ("stderr", capture_stderr)) if wanted]
        self._captures: list[StreamCapture] = []
        self._capture()

    @property
    def filename(self) -> str:
        """The path of this rank's file.

        Raises:
            RuntimeError: Before `Event.INIT`, since the run's name is unknown.
        """
        return self._formatted(self.filename_format)

    @property
    def remote_file_name(self) -> str:
        """The name of the uploaded file.

        Raises:
            RuntimeError: Before `Event.INIT`, since the run's name is unknown.
        """
        return self._formatted(self.remote_file_name_format.replace("\\", "/")).lstrip("/")

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Write hyperparameters."""
        self._log(hyperparameters, lambda name, value: f"[hyperparameter]: {name}: {value} \n")

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Write metrics, with their batch."""
        self._log(metrics, lambda name, value: f"[metric][batch={step}]: {name}: {value} \n")

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Write a table as JSON."""
        self._add(_Entry(f"[table]: {name}: {table_as_json(columns, rows)}\n"))

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Write the actions of algorithms, if `log_traces` is set."""
        if self.should_log_traces:
            self._log(traces, lambda name, value: f"[trace]: {name}:{value}\n")

    def init(self, state: State, logger: Logger) -> None:
        """Open the file, and write the lines logged so far.

        Raises:
            RuntimeError: If it is open already.
            FileExistsError: If it exists, and may be neither replaced nor continued.
        """
        if self._file is not None:
            raise RuntimeError(f"The file {self.filename!r} is open already. Close that Trainer first.")
        self._run_name = state.run_name
        path = Path(self.filename)
        if path.exists() and not (self.overwrite or self.is_resuming):
            raise FileExistsError(
                f"filename={self.filename_format!r} is {str(path)!r} in this run, and there is such a file. Give "
                f"FileLogger(overwrite=True), or the Trainer another run_name."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = KeptFile(path, self.buffer_size, is_continued=self.is_resuming)
        self._capture()
        self._write_pending()

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Sync the file to the disk."""
        self._flush(logger)

    eval_start = epoch_start

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the lines whose values are available, and sync the file at the interval."""
        self._write_pending()
        if state.timestamp.num_batches % self.flush_interval == 0:
            self._flush(logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Sync the file at the interval."""
        if state.timestamp.num_epochs % self.flush_interval == 0:
            self._flush(logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write everything, and sync the file."""
        self._write_pending(waits=True)
        self._flush(logger)

    def close(self, state: State, logger: Logger) -> None:
        """Write and upload everything, and release the console."""
        error = sys.exc_info()[1]
        if error is not None and "stderr" in self._captured:  # printed only after the capture has ended
            self._add(_Entry("".join(traceback.format_exception(error)), "[stderr]: "))
        for capture in self._captures:
            capture.stop()
        self._captures.clear()
        if self._file is not None:
            self._write_pending(waits=True)
            self._is_uploaded_whole, self._state = True, state  # reset if a line is logged during the upload
            try:
                self._flush(logger)
            except Exception:  # `post_close`, which retries, is not called if this raises
                self._is_uploaded_whole = False
                _log.exception("%s could not be uploaded.", self.filename)

    def post_close(self) -> None:
        """Write the lines that other callbacks logged while closing, and close the file."""
        if self._file is None:
            return
        try:
            self._write_pending(waits=True)
            if self._state is not None and not self._is_uploaded_whole:
                self._file.sync()
                self._upload_once_more(self._state)
        finally:
            self._file.close()
            self._file = self._state = None

    def _upload_once_more(self, state: State) -> None:
        """Upload the file to the destinations after this one, which are still open."""
        is_later = False
        for callback in tuple(state.callbacks):
            is_later |= callback is self
            if not isinstance(callback, LoggerDestination) or not overrides(callback, LoggerDestination, "upload_file"):
                continue
            if is_later:
                try:
                    callback.upload_file(state, self.remote_file_name, Path(self.filename), overwrite=True)
                except Exception:  # one failing destination must not keep the file from the others
                    _log.exception("%s did not receive the last lines of %s.", type(callback).__name__, self.filename)
            else:
                _log.warning(
                    "The last lines are in %s alone, since %s has closed before. List it after the FileLogger.",
                    self.filename,
                    type(callback).__name__,
                )

    def _capture(self) -> None:
        if self._captures:
            return
        # A weak reference: the stream would otherwise keep a logger without a Trainer alive, with all printed text.
        this = weakref.ref(self)

        def listen_to(name: str) -> Callable[[str], None]:
            def listen(text: str) -> None:
                if (logger := this()) is not None:
                    logger._add(_Entry(text, f"[{name}]: "))

            return listen

        self._captures = [StreamCapture(name, listen_to(name)) for name in self._captured]

    def _log(self, values: dict[str, Any], line: Callable[[str, str], str]) -> None:
        snapshot = Snapshot(values)

        def render() -> str:
            try:
                known = snapshot.read()
            except RuntimeError as error:  # a failed device must not prevent the following lines
                known = dict.fromkeys(snapshot.values, f"unknown, since the device has failed: {error}")
            return "".join(line(name, format_log_data_value(value)) for name, value in known.items())

        self._add(_Entry(render, snapshot=snapshot))

    def _add(self, entry: "_Entry") -> None:
        if os.getpid() != self._pid:
            self._begin_in_child()
        with self._lock:
            self._pending.append(entry)
        self._write_pending()

    def _begin_in_child(self) -> None:
        """Reset in a forked process, such as a dataloader worker: pending lines belong to the parent."""
        self._pid = os.getpid()
        self._lock = RLock()  # another thread of the parent may have held it during the fork
        self._pending.clear()
        self._is_writing = False
        if self._file is not None:
            self._file.begin_in_child()

    def _write_pending(self, waits: bool = False) -> None:
        """Write the leading lines whose values are available, or wait for all of them."""
        with self._lock:
            if self._file is None or self._is_writing:  # a write that prints leads back here
                return
            self._is_writing = True
            try:
                while self._pending and (waits or (known := self._pending[0].snapshot) is None or known.is_ready()):
                    entry = self._pending.popleft()
                    self._is_uploaded_whole = False
                    # Printed text may contain lone surrogates, as in file names that are not UTF-8.
                    self._file.write(self._with_prefix(entry).encode(errors="backslashreplace"))
            finally:
                self._is_writing = False

    def _with_prefix(self, entry: "_Entry") -> str:
        """Return the text with a prefix before each line, except for empty and continued lines."""
        text = entry.text if isinstance(entry.text, str) else entry.text()
        if entry.prefix:
            pieces: list[str] = []
            for piece in re.findall(r"[^\n]*\n|[^\n]+", text):
                has_prefix = self._is_at_line_start and piece != "\n"
                pieces.append(entry.prefix + piece if has_prefix else piece)
                self._is_at_line_start = piece.endswith("\n")
            return "".join(pieces)
        # A logged line must not continue a line of printed text, such as a progress bar.
        separator = "" if self._is_at_line_start else "\n"
        self._is_at_line_start = True
        return separator + text

    def _flush(self, logger: Logger) -> None:
        if self._file is not None:
            self._write_pending()
            self._file.sync()
            logger.upload_file(self.remote_file_name, self.filename, overwrite=True)

    def _formatted(self, name: str) -> str:
        if self._run_name is None:
            raise RuntimeError(f"The file {name!r} has no name before Event.INIT, when the run gets its own.")
        return format_name_with_dist(name, self._run_name)


class _Entry(NamedTuple):
    """Text to write, or a function that returns it once the snapshot is ready."""

    text: str | Callable[[], str]
    prefix: str = ""
    snapshot: Snapshot | None = None


class KeptFile:
    """File for appending.

    The first failed write, for example on a full disk, causes a warning. The bytes stay in memory until a write
    succeeds. A `buffer_size` less than 0 is the default of the system.
    """

    def __init__(self, path: Path, buffer_size: int, is_continued: bool) -> None:
        self.path = path
        # Unbuffered: with Python's own buffer, it is unknown after a failed write which bytes are in the file.
        self._file = path.open("ab" if is_continued else "wb", buffering=0)
        self._gathered = bytearray()
        self._buffer_size = io.DEFAULT_BUFFER_SIZE if buffer_size < 0 else buffer_size
        self._has_warned = self._is_in_child = False

    def write(self, text: bytes) -> None:
        """Append bytes."""
        self._gathered += text
        if self._is_in_child:
            # Only up to the last line end; progress bars end their lines with a carriage return.
            self._offer(max(self._gathered.rfind(b"\n"), self._gathered.rfind(b"\r")) + 1)
        elif len(self._gathered) >= self._buffer_size:
            self._offer()

    def begin_in_child(self) -> None:
        """Drop the parent's buffer in a forked process, and write whole lines only.

        Parent and child write to the same file, and this copy is never closed.
        """
        self._gathered.clear()
        self._is_in_child = True
        # Children of multiprocessing skip `atexit`; this flushes a last line without a line end.
        Finalize(None, self.flush, exitpriority=0)

    def flush(self) -> None:
        """Write the buffer."""
        self._offer()

    def sync(self) -> None:
        """Write the buffer, and sync the file to the disk."""
        try:
            if self._offer():
                os.fsync(self._file.fileno())
        except OSError as error:  # pipes and some file systems do not support fsync
            self._warn(error)

    def close(self) -> None:
        """Close the file. Bytes that still cannot be written are lost, with a warning."""
        num_lost = 0 if self._offer() else len(self._gathered)
        self._file.close()
        if num_lost:
            warn_logging_problem(
                f"The last {num_lost} bytes of the log are not in {str(self.path)!r}: it could not be written to."
            )

    def _offer(self, size: int | None = None) -> bool:
        """Write the buffer, or its first `size` bytes, and return whether it is empty."""
        left = len(self._gathered) if size is None else size
        try:
            while left:  # an unbuffered write may write fewer bytes
                written = self._file.write(self._gathered[:left])
                del self._gathered[:written]
                left -= written
        except OSError as error:
            self._warn(error)
        return not self._gathered

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn_logging_problem(
            f"{str(self.path)!r} cannot be written to now; training continues: {error}. Logged lines are "
            f"kept in memory and written later."
        )


class StreamCapture:
    """Hook that passes text written to `sys.stdout` or `sys.stderr` to a listener, after the stream has written it."""

    def __init__(self, name: str, listen: Callable[[str], None]) -> None:
        self._stream: Any = getattr(sys, name)
        self._listen: Callable[[str], None] | None = listen
        self._write = self._stream.write
        # If another hook replaced `write` on the instance, `stop` restores it; else it uncovers the class's method.
        self._was_own = "write" in getattr(self._stream, "__dict__", {})
        self._hook = self._write_and_tell  # kept for `is`: each access creates a new bound method
        self._stream.write = self._hook

    def stop(self) -> None:
        """Restore the stream, and stop listening."""
        self._listen = None
        # A hook installed on top of this one still calls it, so this one stays and only writes to the stream.
        if self._stream.write is not self._hook:
            return
        if self._was_own:
            self._stream.write = self._write
        else:
            del self._stream.write

    def _write_and_tell(self, text: str) -> Any:
        result = self._write(text)
        if self._listen is not None:
            self._listen(text)
        return result
