"""Text for the console and log files: settings of a run, tables, captured streams, and a file that retries writes."""

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TextIO, cast

from composer.loggers._service_queue import warn_logging_problem
from composer_dist import get_local_rank
from composer_events.hparams import convert_flat_dict_to_nested_dict
from composer_events.logger import Logger
from composer_events.logger_destination import BufferedDestination, format_log_data_value
from composer_events.state import State

_RULE = "*" * 30
# Strings that YAML reads without quotes, also in lists.
_PLAIN = re.compile(r"[A-Za-z_/][\w./()=+<>*-]*")
# YAML 1.1 reads these words as booleans or null.
_OF_OTHER_KINDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def format_config(hyperparameters: Mapping[str, Any]) -> str:
    """Return hyperparameters as YAML between two rules.

    Example:
        >>> print(format_config({"optimizer/lr": 0.1, "seed": 17}))
        ******************************
        Config:
        optimizer:
          lr: 0.1
        seed: 17
        ******************************
    """
    named = {str(name): value for name, value in hyperparameters.items()}
    with suppress(ValueError):  # a name that is also a prefix of others cannot be nested
        named = convert_flat_dict_to_nested_dict(named)
    lines = _to_yaml(to_plain(named))
    return "\n".join([_RULE, "Config:", *lines, _RULE])


def _to_yaml(values: Mapping[str, Any], indent: str = "") -> list[str]:
    """Convert nested settings to lines of YAML."""
    lines: list[str] = []
    for name, value in sorted(values.items()):
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{_scalar(name)}:", *_to_yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{_scalar(name)}: {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    """Convert a value to YAML, which includes JSON's strings, numbers and lists."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OF_OTHER_KINDS:
        return value
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_scalar(name)}: {_scalar(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, float):
        return _float(value)
    # Escape characters that YAML readers or the console reject.
    return json.dumps(value, ensure_ascii=not (isinstance(value, str) and value.isprintable()))


def _float(value: float) -> str:
    if math.isfinite(value):
        text = repr(float(value))
        return text if "." in text or "e" not in text else text.replace("e", ".0e")  # YAML 1.1 needs the dot
    return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"


_WIDEST = 60  # characters; longer text would move other columns off the screen


def table_as_json(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as pandas' `to_json(orient='split', index=False)` does, with non-ASCII characters unescaped.

    Example:
        >>> table_as_json(["a", "b"], [[1, "x"]])
        '{"columns":["a","b"],"data":[[1,"x"]]}'
    """
    table = {"columns": list(columns), "data": [list(row) for row in rows]}
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False, default=_to_json)


def table_as_text(columns: Sequence[str], rows: Sequence[Sequence[Any]], indent: str = "") -> str:
    """Return a table with aligned columns. Numbers are aligned to the right.

    Example:
        >>> print(table_as_text(["name", "loss"], [["first", 0.51234], ["b", 12.0]]))
        name      loss
        -----  -------
        first   0.5123
        b      12.0000
    """
    columns = [str(column) for column in columns]
    cells = [[_cell(value) for value in row] for row in rows]
    is_number = [all(isinstance(row[column], int | float) for row in rows) for column in range(len(columns))]
    head, *body = aligned([columns, *cells], is_number)
    rule = "  ".join("-" * max(map(len, column)) for column in zip(columns, *cells, strict=True))
    return "\n".join(f"{indent}{line}" for line in (head, rule, *body))


def aligned(rows: Sequence[Sequence[str]], to_the_right: Sequence[bool]) -> list[str]:
    """Return a line for each row of a table, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_the_right, strict=True)
        ).rstrip()
        for row in rows
    ]


def _cell(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else format_log_data_value(value)).split())
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _to_json(value: Any) -> Any:
    """Convert NumPy values and tensors to numbers or lists, and other objects to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class TextLogger(BufferedDestination):
    """Base class of loggers that write text to a stream, beginning with the settings of the run.

    Args:
        stream: `'stderr'`, `'stdout'` or a text stream.
        log_traces: Whether to also write the actions of algorithms.

    Raises:
        ValueError: If the stream is another string.
    """

    def __init__(self, stream: str | TextIO, log_traces: bool) -> None:
        name = stream.lower() if isinstance(stream, str) else None
        if name not in (None, "stdout", "stderr") or (name is None and not callable(getattr(stream, "write", None))):
            kind = ValueError if isinstance(stream, str) else TypeError
            raise kind(f"stream={stream!r} must be 'stderr', 'stdout' or a text stream.")
        self.should_log_traces = log_traces
        self.hparams: dict[str, Any] = {}
        self._stream: str | TextIO = stream if name is None else name
        self._has_shown_hparams = False

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Store hyperparameters, which are written when the run starts."""
        self.hparams.update(hyperparameters)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Write the actions of algorithms, if `log_traces` is set."""
        if self.should_log_traces:
            for name, trace in traces.items():
                self._write(f"[trace]: {name}: {format_log_data_value(trace)}")

    def fit_start(self, state: State, logger: Logger) -> None:
        """Write the settings of the run."""
        self._show_hparams()

    predict_start = fit_start

    def _show_hparams(self) -> None:
        if not self._has_shown_hparams and get_local_rank() == 0:
            self._has_shown_hparams = True
            self._write(format_config(self.hparams))

    def _write(self, text: str) -> None:
        stream = self._file()
        stream.write(text + "\n")
        stream.flush()

    def _file(self) -> TextIO:
        # Looked up at each write, to follow redirections of the stream.
        return getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream


_DEEPEST = 50  # levels, far below the recursion limit


def to_plain(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Convert a value for JSON: unsupported keys and objects, and recursive containers, become text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    within = (*outer, id(value))  # the containers around an item, to detect one that contains itself
    if isinstance(value, (Mapping, list, tuple)) and id(value) not in outer and len(outer) < _DEEPEST:
        if isinstance(value, Mapping):
            return {_text(key): to_plain(item, within) for key, item in cast("Mapping[Any, Any]", value).items()}
        return [to_plain(item, within) for item in cast("list[Any]", value)]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # a foreign object's __str__ may raise anything
        return f"<{type(value).__name__}: {type(error).__name__}>"


class StreamCapture:
    """Hook that passes text written to `sys.stdout` or `sys.stderr` to a listener.

    Args:
        name: `'stdout'` or `'stderr'`. The current stream of this name is captured.
        listen: Function that is called with each text, after the stream has written it.
    """

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


class KeptFile:
    """File for appending.

    The first failed write, for example on a full disk, causes a warning. The bytes stay in memory until a write
    succeeds.

    Args:
        path: The path of the file.
        buffer_size: The number of bytes to buffer; less than 0 for the default of the system.
        is_continued: Whether to append to an existing file.
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
