"""Which folder a run gets."""

from __future__ import annotations

import itertools
from pathlib import Path

from composer.report.runs import METRICS
from composer_events.formatting import format_name_with_dist

__all__ = ["make_folder"]


def make_folder(template: str, run_name: str, *, may_hold_a_run: bool, goes_beside_others: bool) -> Path:
    """Make the folder of a run and return it, as a path that holds wherever the process goes.

    Args:
        template: Its name, with the placeholders of `format_name_with_dist`.
        run_name: The run's.
        may_hold_a_run: Whether there may be a run in it, to be replaced or continued.
        goes_beside_others: Whether, where there is one, a number is added to the name.

    Raises:
        FileExistsError: If there is a run in it and neither is wanted.
        OSError: If it cannot be made.
    """
    folder = wanted = Path(format_name_with_dist(template, run_name)).absolute()
    for number in itertools.count(2):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / METRICS).touch(exist_ok=may_hold_a_run)  # one of two runs that begin at once gets it
        except FileExistsError:
            if not goes_beside_others:
                raise FileExistsError(
                    f"folder={template!r} is {str(folder)!r} in this run, and holds an earlier one. Give "
                    f"RunRecorder(overwrite=True), or the Trainer another run_name."
                ) from None
            folder = wanted.with_name(f"{wanted.name}-{number}")
        else:
            return folder
    raise AssertionError("there is always a higher number")
