"""The HTML page about runs: one file with its styles, its scripts and its data."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

__all__ = ["write_described"]

_SCRIPTS: Final = ("page_parts.js", "page_chart.js", "page_curves.js", "page.js")  # in the order of their dependencies
_AXES: Final = ("batch", "epoch", "sample", "token", "time_s")


def write_described(described: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page for the result of `describe_runs`, and return the path."""
    # Browsers reject a whole JSON text that contains NaN, so a NaN that got this far is an error here.
    packed = described | {"runs": [_packed(run) for run in described["runs"]]}
    data = json.dumps(packed, allow_nan=False, separators=(",", ":"))
    here = files("composer.report")
    template = here.joinpath("page.html").read_text()
    page = template.format(
        style=here.joinpath("page.css").read_text(),
        script="".join(here.joinpath(name).read_text() for name in _SCRIPTS),
        # Names and messages are untrusted: no tag in them may end the script element.
        data=data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
    )
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder. Name the file that the page goes to, such as {path / 'report.html'}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(path)
    return path


def _packed(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run whose curves share one table of positions, stored as differences: most of a page is positions.

    A position is the place on all axes. `at` of a curve is its rows of the table.
    """
    rows = sorted({row for curve in run["curves"].values() for row in _rows(curve)})
    numbers = {row: number for number, row in enumerate(rows)}
    curves = {
        name: {
            "values": curve["values"],
            "not_finite": curve["not_finite"],
            "at": _differences(numbers[row] for row in _rows(curve)),
        }
        for name, curve in run["curves"].items()
    }
    # Milliseconds, because differences of fractions would add up their rounding.
    scaled = {axis: [round(row[place] * (1000 if axis == "time_s" else 1)) for row in rows] for place, axis in _PLACES}
    return run | {"curves": curves, "positions": {axis: _differences(column) for axis, column in scaled.items()}}


_PLACES: Final = tuple(enumerate(_AXES))


def _rows(curve: dict[str, list[float]]) -> Iterable[tuple[float, ...]]:
    return zip(*(curve[axis] for axis in _AXES), strict=True)


def _differences(column: Iterable[int]) -> list[int]:
    values = [0, *column]
    return [after - before for before, after in pairwise(values)]
