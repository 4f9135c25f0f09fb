"""Self-contained HTML page about one or several runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from composer.report.description import describe_runs
from composer_models import MissingConditionalImportError

try:
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise MissingConditionalImportError("report", "plotly") from error

__all__ = ["write_described", "write_page"]

_SCRIPTS = ("page_parts.js", "page_curves.js", "page.js")  # in the order of their dependencies
# The security policy forbids network access: the page must work offline, and must not leak its data.
_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Run report</title>
<style>{style}</style>
</head>
<body>
<main id="report"></main>
<script type="application/json" id="composer-data">{data}</script>
<script>{plotly}</script>
<script>"use strict"; (() => {{
{script}}})();</script>
</body>
</html>
"""


def write_page(
    folders: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    max_points: int = 4000,
    verify: bool = False,
) -> Path:
    """Write the page about runs.

    Args:
        folders: Folders written by `RunRecorder`s; the curves of several runs share their plots.
        path: The file. An existing file is replaced when the new one is complete.
        max_points: Maximum number of points drawn per curve.
        verify: Whether to verify the hashes of the checkpoints.

    Returns:
        The path.

    Raises:
        FileNotFoundError: If a folder holds no run.
        ValueError: If `folders` is empty or `max_points` is less than 3.
    """
    return write_described(describe_runs(folders, max_points=max_points, verify=verify), path)


def write_described(described: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page for the result of `describe_runs`, and return the path."""
    # Browsers reject a whole JSON text that contains NaN, so a NaN that got this far is an error here.
    data = json.dumps(described, allow_nan=False, separators=(",", ":"))
    here = files("composer.report")
    page = _TEMPLATE.format(
        style=here.joinpath("page.css").read_text(),
        script="".join(here.joinpath(name).read_text() for name in _SCRIPTS),
        plotly=get_plotlyjs(),
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
