"""What a benchmark has measured, as rows of the table in docs/benchmarks.md."""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Row", "add_option", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was measured.

    Attributes:
        what: What takes the time, in a few words.
        ours: How much of it, in the unit.
        unit: Such as `'ms'`; `''` for a number of its own.
        plain: How much of it the plain PyTorch way takes.
        peers: How much of it other libraries take, by their names.
        ratio: Ours to the plain way's, as the benchmark itself computes it.
        budget: What the benchmark holds against the measurement, as text.
        is_met: Whether it is within its budget; `None` without one.
    """

    what: str
    ours: float
    unit: str = "ms"
    plain: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    ratio: float | None = None
    budget: str = ""
    is_met: bool | None = None


def add_option(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be asked for its rows."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write what was measured there, as rows")


def write(path: Path | None, rows: Iterable[Row]) -> None:
    """Write the rows, if they were asked for."""
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
