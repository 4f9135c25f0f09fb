"""Text for the console: settings of a run, tables and captured streams."""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

from composer_dist import get_local_rank
from composer_events.arguments import check_flags
from composer_events.hparams import convert_flat_dict_to_nested_dict
from composer_events.logger import Logger
from composer_events.logger_destination import BufferedDestination, format_log_data_value
from composer_events.state import State

__all__ = ["StreamCapture", "TextLogger", "aligned", "format_config", "table_as_json", "table_as_text", "to_plain"]

_RULE = "*" * 30
# Strings that YAML reads without quotes. They contain no " #", which starts a comment, and no ": ", which ends a key.
_PLAIN = re.compile(r"[A-Za-z_/](?:[\w./()=,+<>*-]| (?! |#|$)|:(?! |$))*")
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
        return f"{{{', '.join(f'{_quoted(name)}: {_quoted(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, float):
        return _float(value)
    # Escape characters that YAML readers or the console reject.
    return json.dumps(value, ensure_ascii=not (isinstance(value, str) and value.isprintable()))


def _quoted(item: Any) -> str:
    """Convert an item of a list or mapping, in which an unquoted string would end at a comma."""
    return json.dumps(item, ensure_ascii=not item.isprintable()) if isinstance(item, str) else _scalar(item)


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

    Raises:
        ValueError: If the number of cells in a row is not the number of columns.
    """
    columns = [str(column) for column in columns]
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(
                f"rows[{number}]={list(row)!r} has {len(row)} cells, and the table {len(columns)} columns: "
                f"{', '.join(columns)}. Give each row a cell for each column."
            )
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
        TypeError: If an argument has the wrong type.
        ValueError: If the stream is another string.
    """

    def __init__(self, stream: str | TextIO, log_traces: bool) -> None:
        check_flags(log_traces=log_traces)
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

    def predict_start(self, state: State, logger: Logger) -> None:
        """Write the settings of the run."""
        self._show_hparams()

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
