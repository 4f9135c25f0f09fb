"""Error files: JSON records of the exception that ended a rank, for its launcher.

The launcher passes the path in `COMPOSER_ERROR_FILE`, torchrun in `TORCHELASTIC_ERROR_FILE`; torchrun's tools can
read the file. This module does not import torch.
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

_NUM_COLLECTIVES = 10
_VARIABLES = ("COMPOSER_ERROR_FILE", "TORCHELASTIC_ERROR_FILE")

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install() -> None:
    """Install an exception hook that writes the error file.

    The exception still appears on stderr. Without a launcher, or on a second call, this does nothing.
    """
    if _path() is None or getattr(sys.excepthook, "records_for_launcher", False):
        return
    sys.excepthook = _Recorder(sys.excepthook)


def record_exception(error: BaseException) -> None:
    """Write an exception to the error file, for code that ends the process by itself.

    The file holds `message`, `exception_type`, `traceback`, `rank`, `local_rank`, `pid`, `timestamp` (seconds since
    1970), `notes` (from `add_note`), `event` (an attribute that some exceptions have) and `collectives` (the last ones
    of a rank that records its progress). The launcher acts at once on
    a file of the rank's own process, and on that of a child process only after the rank has failed. Without a launcher
    nothing is written.

    Args:
        error: The exception.
    """
    path = _path()
    if path is None:
        return
    try:
        # Renamed into place, since the launcher may read the file at any time.
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(_describe(error)), encoding="utf-8")
        draft.replace(path)
    except OSError as failure:
        # Not raised: it would hide the error that ends this process.
        sys.stderr.write(f"the error file {str(path)!r} could not be written: {failure}\n")


class _Recorder:
    """An exception hook that writes the error file before the previous hook runs."""

    records_for_launcher = True  # the launcher's `sitecustomize` hook has it too

    def __init__(self, following: _Hook) -> None:
        self._following = following
        self._pid = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # An exception of a forked child is not the end of the rank, and an interrupt is intended.
        if os.getpid() == self._pid and not issubclass(kind, KeyboardInterrupt):
            record_exception(error.with_traceback(trace))
        self._following(kind, error, trace)


def _path() -> Path | None:
    for variable in _VARIABLES:
        if os.environ.get(variable):
            return Path(os.environ[variable])
    return None


def _describe(error: BaseException) -> dict[str, Any]:
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
        "collectives": _last_collectives(),
        # The fields that torch.distributed.elastic reads.
        "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
    }


def _last_collectives() -> list[dict[str, Any]]:
    recorder = sys.modules.get("composer_dist.flight_recorder")  # not imported: it is there if progress is recorded
    return [] if recorder is None else recorder.last_collectives(_NUM_COLLECTIVES)


def _number(variable: str) -> int | None:
    """Return the variable as a number, or `None`: a malformed environment must not prevent the error file."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
