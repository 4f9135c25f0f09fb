"""The recorder of runs whose scripts name none: the environment variable `COMPOSER_RUNS` asks for it."""

from __future__ import annotations

import os

from composer.report.recorder import RunRecorder

__all__ = ["VARIABLE", "recorder_of_environment"]

VARIABLE = "COMPOSER_RUNS"
"""The folder that gets a folder for each run. Not set, or empty: none."""


def recorder_of_environment() -> list[RunRecorder]:
    """Return what the Trainer adds to the loggers: a recorder, or nothing.

    It is one that no training fails for, and that leaves the page to `composer report`.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return []
    literally = folder.replace("{", "{{").replace("}", "}}")
    return [RunRecorder(os.path.join(literally, "{run_name}"), page=False, is_optional=True)]
