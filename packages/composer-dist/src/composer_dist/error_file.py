"""How a rank tells its launcher what it raised: a small JSON file, written when an exception ends the process.

The launcher names the file in `COMPOSER_ERROR_FILE`; torchrun does so in `TORCHELASTIC_ERROR_FILE`, and its tools
can read what is written here. Nothing here imports torch.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["install", "record_exception"]

_VARIABLES = ("COMPOSER_ERROR_FILE", "TORCHELASTIC_ERROR_FILE")

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install() -> None:
    """Have the exception that ends this process written to the file that its launcher named.

    The exception is shown on stderr all the same. Without a launcher nothing is changed, and a second call does
    nothing.
    """
    if _path() is None or getattr(sys.excepthook, "records_for_launcher", False):
        return
    sys.excepthook = _Recorder(sys.excepthook)


def record_exception(error: BaseException) -> None:
    """Write an exception to the file that the launcher named, for code that ends the process by itself.

    It holds `message`, `exception_type`, `traceback`, `rank`, `local_rank`, `pid`, `timestamp` (seconds since 1970),
    `notes` (what `add_note` added) and `event` (that attribute of the exception, where it has one). The launcher takes
    the word of the rank's own process at once, and that of one which the rank started only once the rank has failed.
    Without a launcher nothing is written.

    Args:
        error: What was raised.
    """
    path = _path()
    if path is None:
        return
    try:
        # Renamed into place, since the launcher may look at any moment.
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(_describe(error)), encoding="utf-8")
        draft.replace(path)
    except OSError as failure:
        # The process is ending for a reason of its own, which matters more than this one.
        sys.stderr.write(f"the error file {str(path)!r} could not be written: {failure}\n")


class _Recorder:
    """The hook that Python calls with the exception that nobody caught."""

    records_for_launcher = True  # the launcher's own hook, which is there before the script, has it too

    def __init__(self, following: _Hook) -> None:
        self._following = following
        self._pid = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # What a forked child raises is not the rank's end, and an interrupt is what somebody asked for.
        if os.getpid() == self._pid and not issubclass(kind, KeyboardInterrupt):
            record_exception(error.with_traceback(trace))
        self._following(kind, error, trace)


def _path() -> Path | None:
    """Return the file that the launcher named."""
    for variable in _VARIABLES:
        if os.environ.get(variable):
            return Path(os.environ[variable])
    return None


def _describe(error: BaseException) -> dict[str, Any]:
    """Return what the file says, in types that JSON has."""
    now = time.time()
    text = "".join(traceback.format_exception(error))
    event = getattr(error, "event", None)
    return {
        "message": f"{type(error).__name__}: {error}",
        "exception_type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "traceback": text,
        "rank": _number("RANK"),
        "local_rank": _number("LOCAL_RANK"),
        "pid": os.getpid(),
        "timestamp": now,
        "notes": [str(note) for note in getattr(error, "__notes__", ())],
        "event": None if event is None else str(event),
        # Where the tools of torch.distributed.elastic look.
        "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
    }


def _number(variable: str) -> int | None:
    """Return the variable's number; the file is written whatever the environment holds."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
