"""What a page about runs shows, as data."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer.report._units import units_of
from composer.report.downsampling import largest_triangles
from composer.report.runs import AXES, Curve, Run, read_run

__all__ = ["describe_runs"]


def describe_runs(
    folders: Sequence[str | os.PathLike[str]], *, max_points: int = 4000, verify: bool = False
) -> dict[str, Any]:
    """Return what the page shows, as JSON can have it.

    Args:
        folders: What `RunRecorder`s have written.
        max_points: How many points of a curve are kept at most.
        verify: Whether to compare every byte of the checkpoints with their hashes.

    Raises:
        FileNotFoundError: If a folder holds no run.
        ValueError: If there are no folders, or fewer than 3 points.
    """
    if not folders:
        raise ValueError("There is no run to show. Pass the folder of at least one.")
    if max_points < 3:
        raise ValueError(f"max_points={max_points!r} draws no curve. Pass 3 or more.")
    runs = [read_run(folder, verify=verify) for folder in folders]
    described = [_describe(run, max_points) for run in runs]
    for run, name in zip(described, _labels(runs), strict=True):
        run["name"] = name
    return {"version": 1, "runs": described}


def _describe(run: Run, max_points: int) -> dict[str, Any]:
    config = {str(name): _text(value) for name, value in _flat(run.config)}
    return {
        "name": run.name,
        "folder": run.folder,
        "config": config,
        "status": run.status,
        "curves": {name: _points(curve, max_points) for name, curve in sorted(run.curves.items())},
        "units": units_of(run.curves, config),
        "acting": run.acting,
        "times": run.times,
        "checkpoints": [
            {"path": each.path, "size_bytes": each.size_bytes, "verification": each.verification}
            for each in run.checkpoints
        ],
        "traces": run.traces,
        "num_bad_lines": run.num_bad_lines,
    }


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs, with their folders where several have one name."""
    labels = [run.name for run in runs]
    folders = [Path(os.path.abspath(run.folder)) for run in runs]
    for shown in ([folder.name for folder in folders], folders):
        longer = [f"{run.name} ({folder})" for run, folder in zip(runs, shown, strict=True)]
        counts = Counter(labels)
        labels = [label if counts[label] == 1 else other for label, other in zip(labels, longer, strict=True)]
    return labels


def _points(curve: Curve, max_points: int) -> dict[str, Any]:
    kept = range(len(curve.values))
    if len(curve.values) > max_points:
        kept = largest_triangles(curve.at["batch"], curve.values, max_points)
    values = [curve.values[index] for index in kept]
    return {
        "values": [value if math.isfinite(value) else None for value in values],
        "not_finite": {str(index): str(value) for index, value in enumerate(values) if not math.isfinite(value)},
        **{axis: [curve.at[axis][index] for index in kept] for axis in AXES},
    }


def _flat(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(config, dict) and config:
        return [entry for name, value in config.items() for entry in _flat(value, f"{prefix}{name}/")]
    return [(prefix.rstrip("/"), config)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
