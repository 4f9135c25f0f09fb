"""Data about recorded runs, read from their folders, and a self-contained HTML page of it."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

from composer.report._goodput import goodput
from composer_dist.attempts import read_attempts

__all__ = ["Checkpoint", "Curve", "Run", "describe_runs", "read_run", "write_page"]

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
    attempts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


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
        attempts=read_attempts(folder),
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
    `folder_then` is the folder at the time when the run wrote its status.
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


_DIGITS: Final = 8  # significant digits
_MOST_POINTS: Final = 4000  # per curve
_FEWEST_POINTS: Final = 500  # about as many as a chart has pixels
_POINTS_OF_PAGE: Final = 50_000  # of all curves, about 1 MB


def describe_runs(
    folders: Sequence[str | os.PathLike[str]], *, max_points: int | None = None, verify: bool = False
) -> dict[str, Any]:
    """Return the data of the page, ready for JSON."""
    if not folders:
        raise ValueError("No runs to show. Pass the folder of at least one.")
    if max_points is not None and max_points < 3:
        raise ValueError(f"max_points={max_points!r} draws no curve. Pass 3 or more.")
    runs = [read_run(folder, verify=verify) for folder in folders]
    if max_points is None:
        num_curves = max(1, sum(len(run.curves) for run in runs))
        max_points = max(_FEWEST_POINTS, min(_MOST_POINTS, _POINTS_OF_PAGE // num_curves))
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
        "summary": {name: _extremes(name, curve) for name, curve in run.curves.items() if _SUMMARIZED.match(name)},
        "acting": run.acting,
        "times": run.times,
        "checkpoints": [
            {"path": each.path, "size_bytes": each.size_bytes, "verification": each.verification}
            for each in run.checkpoints
        ],
        "traces": run.traces,
        "num_bad_lines": run.num_bad_lines,
        "goodput": goodput(run.attempts),
    }


_SUMMARIZED: Final = re.compile(r"(loss|metrics)/|lr-")
_IS_LOWER_BETTER: Final = re.compile(
    r"loss|error|entropy|perplexity|divergence|distance|hinge|(^|[/_])(mse|mae|rmse|mape|wer|cer|nll|bpb)([/_]|$)", re.I
)


def _extremes(name: str, curve: Curve) -> dict[str, Any]:
    """Return the last and the best value, each with its batch and epoch. The name decides what is better."""
    is_lower_better = _IS_LOWER_BETTER.search(name) is not None
    finite = [index for index, value in enumerate(curve.values) if math.isfinite(value)]
    best = (min if is_lower_better else max)(finite, key=curve.values.__getitem__, default=None)
    return {
        "last": _point(curve, len(curve.values) - 1),
        "best": None if best is None else _point(curve, best),
        "is_lower_better": is_lower_better,
    }


def _point(curve: Curve, index: int) -> dict[str, Any]:
    value = curve.values[index]
    return {
        "value": _short(value) if math.isfinite(value) else str(value),
        **{axis: _short(curve.at[axis][index]) for axis in ("batch", "epoch")},
    }


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs; equal names are followed by their folders."""
    labels = [run.name for run in runs]
    folders = [Path(os.path.abspath(run.folder)) for run in runs]
    # The folder's name is tried first; its full path is used only if that is ambiguous as well.
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
        # JSON has no NaN: the curve gets a gap, and the page shows the value from the second entry.
        "values": [_short(value) if math.isfinite(value) else None for value in values],
        "not_finite": {str(index): str(value) for index, value in enumerate(values) if not math.isfinite(value)},
        **{axis: [_short(curve.at[axis][index]) for index in kept] for axis in AXES},
    }


def _short(value: float) -> float:
    """Round a number of a curve, since more digits would enlarge the page, and no screen shows them."""
    return int(value) if value.is_integer() and abs(value) < 10**_DIGITS else float(f"{value:.{_DIGITS}g}")


def _flat(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(config, dict) and config:
        return [entry for name, value in config.items() for entry in _flat(value, f"{prefix}{name}/")]
    return [(prefix.rstrip("/"), config)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


_SECONDS: Final = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
_OF_TIME: Final = ("time/train", "time/val", "time/total")
_TOLERANCE: Final = 1e-3  # relative, between two rounded readings of one clock
# The first pattern that matches a full name is used. Names chosen by users get no unit.
_KNOWN: Final = tuple(
    (re.compile(pattern), unit)
    for pattern, unit in (
        (r"time/batch(_in_epoch)?", "batches"),
        (r"time/(epoch|sample|token)(_in_epoch)?", r"\1s"),
        (r"throughput/(batches|samples|tokens)_per_sec", r"\1/s"),
        (r"throughput/device/(batches|samples|tokens)_per_sec", r"\1/s per device"),
        (r"throughput/flops_per_sec", "FLOP/s"),
        (r"throughput/device/flops_per_sec", "FLOP/s per device"),
        (r"throughput/device/mfu", "share of the peak"),
        (r"memory/\w*(_mem|gigabytes)\w*", "GB"),
        (r"memory/alloc_retries\w*", "retries"),
        (r"trainer/device_train_microbatch_size|schedule/batch_size", "samples"),
        (r"(cpu|disk)_memory_percent|cpu_percentage|(m\w\w_)?(gpu|memory)_percentage_rank_\d+", "%"),
        (r"(cpu|disk)_memory_\w+", "bytes"),
        (r"network_bytes_\w+", "bytes since the start of the machine"),
        (r"network_packets_\w+", "packets since the start of the machine"),
        (r"(m\w\w_)?gpu_temperature_C_rank_\d+", "°C"),
        (r"(m\w\w_)?gpu_power_usage_W_rank_\d+", "W"),
    )
)


def units_of(curves: Mapping[str, Curve], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the units of a run's metrics by name; unknown ones are left out.

    Example:
        >>> units_of({"throughput/device/samples_per_sec": ..., "loss/train/total": ...}, {})
        {'throughput/device/samples_per_sec': 'samples/s per device'}
    """
    known = ((name, _known_unit(name)) for name in curves)
    units = {name: unit for name, unit in known if unit is not None}
    if (of_time := _unit_of_time(curves)) is not None:
        units |= {name: of_time for name in _OF_TIME if name in curves}
    if (remaining := config.get("time/remaining_estimate_unit")) in _SECONDS and "time/remaining_estimate" in curves:
        units["time/remaining_estimate"] = remaining
    return units


def _known_unit(name: str) -> str | None:
    for pattern, unit in _KNOWN:
        if match := pattern.fullmatch(name):
            return match.expand(unit) if "\\" in unit else unit
    return None


def _unit_of_time(curves: Mapping[str, Curve]) -> str | None:
    """Return the time unit of a `SpeedMonitor`, by comparison with the record's clock, which counts seconds."""
    curve = curves.get("time/train")
    if curve is None:
        return None
    # From the end, where the relative rounding error of the clocks is smallest.
    for value, seconds in zip(reversed(curve.values), reversed(curve.at["time_s"]), strict=True):
        if math.isfinite(value) and value > 0 and seconds > 0:
            ratio = seconds / value
            return next((unit for unit, of in _SECONDS.items() if math.isclose(ratio, of, rel_tol=_TOLERANCE)), None)
    return None


def largest_triangles(x: Sequence[float], y: Sequence[float], num_points: int) -> list[int]:
    """Downsample a curve while preserving its shape and its peaks.

    The first and the last point are kept. From each stretch between them, the point that spans the largest triangle
    with its neighbors is kept. Up to `num_points` points that are not finite are kept in addition, because they matter.

    Returns:
        The indices of the kept points, in order.

    Reference:
        Steinarsson, "Downsampling Time Series for Visual Representation", 2013.

    Example:
        >>> largest_triangles(range(7), [0, 0, 0, 9, 0, 0, 0], 3)
        [0, 3, 6]
    """
    finite = [index for index, value in enumerate(y) if math.isfinite(value)]
    others = [index for index, value in enumerate(y) if not math.isfinite(value)]
    # After a divergence, most values may be NaN, so their number is limited as well.
    if len(others) > num_points:
        others = others[:: math.ceil(len(others) / num_points)]
    if len(finite) <= num_points:
        return sorted(finite + others)
    chosen = [finite[0]]
    width = (len(finite) - 2) / (num_points - 2)
    for number in range(num_points - 2):
        begin, end = 1 + int(number * width), 1 + int((number + 1) * width)
        # Neighbors are the previous chosen point and, since the next one is unknown, the mean of the next stretch.
        after = finite[end : max(end + 1, 1 + int((number + 2) * width))] or finite[-1:]
        mean_x, mean_y = sum(x[i] for i in after) / len(after), sum(y[i] for i in after) / len(after)
        last_x, last_y = x[chosen[-1]], y[chosen[-1]]
        chosen.append(
            max(
                finite[begin : max(end, begin + 1)],
                key=lambda i: abs((last_x - mean_x) * (y[i] - last_y) - (last_x - x[i]) * (mean_y - last_y)),
            )
        )
    return sorted([*chosen, finite[-1], *others])


def write_page(
    folders: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    max_points: int | None = None,
    verify: bool = False,
) -> Path:
    """Write the page about runs.

    Args:
        folders: Folders written by `RunRecorder`s; the curves of several runs share their plots.
        path: The file. An existing file is replaced when the new one is complete.
        max_points: Maximum number of points drawn per curve; see `describe_runs`.
        verify: Whether to verify the hashes of the checkpoints.

    Returns:
        The path.

    Raises:
        FileNotFoundError: If a folder holds no run.
        ValueError: If `folders` is empty or `max_points` is less than 3.
    """
    return write_described(describe_runs(folders, max_points=max_points, verify=verify), path)


_SCRIPTS: Final = ("page_parts.js", "page_chart.js", "page_curves.js", "page.js")  # in the order of their dependencies


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
    scaled = {
        axis: [round(row[place] * (1000 if axis == "time_s" else 1)) for row in rows] for place, axis in enumerate(AXES)
    }
    return run | {"curves": curves, "positions": {axis: _differences(column) for axis, column in scaled.items()}}


def _rows(curve: dict[str, list[float]]) -> Iterable[tuple[float, ...]]:
    return zip(*(curve[axis] for axis in AXES), strict=True)


def _differences(column: Iterable[int]) -> list[int]:
    values = [0, *column]
    return [after - before for before, after in pairwise(values)]
