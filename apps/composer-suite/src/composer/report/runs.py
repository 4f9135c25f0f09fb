"""Reader for the folders of recorded runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

__all__ = [
    "ACTING",
    "AXES",
    "CONFIG",
    "METRICS",
    "STATUS",
    "TIMES",
    "Checkpoint",
    "Curve",
    "Run",
    "now_at",
    "read_json",
    "read_run",
]

CONFIG, METRICS, ACTING, TIMES, STATUS = "config.json", "metrics.jsonl", "acting.json", "times.json", "status.json"
AXES = ("batch", "epoch", "sample", "token", "time_s")


@dataclass(slots=True)
class Curve:
    """One metric over the time in training.

    Attributes:
        at: The positions of the points on each axis (`batch`, `epoch`, `sample`, `token`, `time_s`).
        values: The points, including NaN and infinities.
    """

    at: dict[str, list[float]] = field(default_factory=lambda: {axis: [] for axis in AXES})
    values: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Checkpoint of a run. `verification` is text about its condition."""

    path: str
    size_bytes: int | None
    verification: str


@dataclass(frozen=True, slots=True)
class Run:
    """Content of a recorded run."""

    name: str
    folder: str
    config: dict[str, Any]
    status: dict[str, Any]
    curves: dict[str, Curve]
    acting: dict[str, Any]
    times: dict[str, Any]
    checkpoints: list[Checkpoint]
    traces: list[str] = field(default_factory=list[str])
    num_bad_lines: int = 0


def read_run(folder: str | os.PathLike[str], *, verify: bool = False) -> Run:
    """Read the folder of a run, even if it is still running or was killed.

    Args:
        folder: The folder of a `RunRecorder`.
        verify: Whether to verify the hashes of the checkpoints, which reads them completely.

    Raises:
        FileNotFoundError: If the folder does not exist, or holds no run.
    """
    folder = Path(folder)
    if not (folder / METRICS).exists():
        raise FileNotFoundError(
            f"{str(folder)!r} holds no run: it has no {METRICS}. Pass a folder that a RunRecorder has written, such as "
            f"runs/my-run."
        )
    config, status = read_json(folder / CONFIG), read_json(folder / STATUS)
    curves, num_bad_lines = _read_curves(folder / METRICS)
    return Run(
        name=str(config.get("run_name", folder.name)),
        folder=str(folder),
        config=config,
        status=status,
        curves=curves,
        acting=read_json(folder / ACTING),
        times=read_json(folder / TIMES),
        checkpoints=[
            _inspect(now_at(path, status.get("folder"), folder), verify=verify)
            for path in _texts(status.get("checkpoints"))
        ],
        traces=_traces(folder, status),
        num_bad_lines=num_bad_lines,
    )


def _traces(folder: Path, status: Mapping[str, Any]) -> list[str]:
    """Return the traces in the folder, and those elsewhere that still exist."""
    inside = sorted(str(path) for path in folder.glob("traces/*.json*"))
    told = [now_at(path, status.get("folder"), folder) for path in _texts(status.get("traces"))]
    known = {os.path.abspath(path) for path in inside}
    return inside + [path for path in told if os.path.exists(path) and os.path.abspath(path) not in known]


def _texts(value: Any) -> list[str]:
    return [text for text in cast("list[Any]", value) if isinstance(text, str)] if isinstance(value, list) else []


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty one if it is missing or damaged."""
    try:
        value: Any = json.loads(path.read_text())
    # ValueError includes invalid JSON and invalid UTF-8: a killed run may have left a damaged file.
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _read_curves(path: Path) -> tuple[dict[str, Curve], int]:
    """Return the curves, and the number of unreadable lines, such as the last one of a killed run."""
    # Positions are stored once per line, not per value: all metrics of a line share them until the end.
    times: dict[str, list[float]] = {axis: [] for axis in AXES}
    seen: dict[str, tuple[list[int], list[float]]] = {}  # by name: line numbers and values
    num_lines = num_bad = 0
    with path.open(errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
                where = {axis: float(record.get(axis, 0)) for axis in AXES}
                if not all(map(math.isfinite, where.values())):
                    raise ValueError(f"{where} is not a time in training")
                values = {str(name): float(value) for name, value in record["metrics"].items()}
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                num_bad += 1
                continue
            for axis, position in where.items():
                times[axis].append(position)
            for name, value in values.items():
                if (found := seen.get(name)) is None:
                    found = seen[name] = ([], [])
                found[0].append(num_lines)
                found[1].append(value)
            num_lines += 1
    curves = {
        name: Curve({axis: [of_lines[line] for line in lines] for axis, of_lines in times.items()}, values)
        for name, (lines, values) in seen.items()
    }
    return curves, num_bad


def now_at(path: str, folder_then: Any, folder: Path) -> str:
    """Return the current path of a run's file, whose folder may have been moved or copied.

    The file in the folder takes precedence, because the original of a copied run may have changed since then.

    Args:
        path: The path at the time when the run wrote its status.
        folder_then: The folder at that time, from the status.
        folder: The folder now.
    """
    if not isinstance(folder_then, str) or not path.startswith(os.path.join(folder_then, "")):
        return path
    inside = str(folder / os.path.relpath(path, folder_then))
    return inside if os.path.exists(inside) else path


def _inspect(path: str, *, verify: bool) -> Checkpoint:
    from composer_checkpoint import inspect_file  # here, because it imports torch
    from composer_checkpoint import verify as verify_checkpoint
    from composer_checkpoint.errors import CheckpointError

    if "://" in path:
        return Checkpoint(path, None, "in a store, not looked at here")
    if not os.path.exists(path):
        return Checkpoint(path, None, "not there any more")
    files = Path(path).rglob("*") if os.path.isdir(path) else [Path(path)]
    size_bytes = sum(file.stat().st_size for file in files if file.is_file())
    try:
        if verify:
            manifest = verify_checkpoint(path)
            return Checkpoint(path, size_bytes, "verified" if manifest else "no manifest to verify with")
        manifest = inspect_file(path).manifest
    except (CheckpointError, OSError) as error:
        return Checkpoint(path, size_bytes, f"damaged: {error}")
    return Checkpoint(path, size_bytes, "has a manifest, not verified here" if manifest else "no manifest")
