"""Small files that say how a run stands, replaced as a whole whenever that has changed."""

from __future__ import annotations

import json
from logging import DEBUG, WARNING, getLogger
from pathlib import Path
from typing import Any

from composer.loggers._plain_values import to_plain

__all__ = ["FactFiles"]

_log = getLogger(__name__)


class FactFiles:
    """Files of JSON in a folder. One that cannot be written is a line of the log, the first time as a warning.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[str, str] = {}
        self._has_warned = False

    def write(self, name: str, value: Any) -> None:
        """Replace a file, unless it says so already."""
        text = _as_json(value)
        if self._texts.get(name) == text:
            return
        path, unfinished = self._folder / name, self._folder / f".{name}.unfinished"
        try:
            unfinished.write_text(text)
            unfinished.replace(path)
            self._texts[name] = text
        except OSError as error:  # a full disk ends no training, and is full for longer than anybody wants to read
            _log.log(DEBUG if self._has_warned else WARNING, "%s could not be written: %s", path, error)
            self._has_warned = True


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, indent=1, default=str)
    except Exception:  # settings may be any objects, with keys that JSON has not, or in each other
        return json.dumps(to_plain(value), indent=1)
