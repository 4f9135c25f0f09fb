"""The record of a run's attempts in its folder: how each one spent its time.

A run that is started again, by its launcher or later on by a user, adds an attempt. The launcher writes the record if
there is one, else rank 0. `composer report` computes the goodput of the run from it.

Example:
    >>> from tempfile import mkdtemp
    >>> folder = mkdtemp()
    >>> write_attempt_of_rank(folder, (1.8e9, 1.8e9 + 60), (0, 50), {"train": 40.0, "data": 2.0}, "running")
    >>> [(attempt["batch"], attempt["seconds"]["train"]) for attempt in read_attempts(folder)]
    [(50, 40.0)]
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

__all__ = ["FILE", "read_attempts", "write_attempt", "write_attempt_of_rank"]

FILE: Final = "attempts.json"
"""The file in the folder of a run."""
_LARGEST: Final = 1e15  # of a number in it; NaN is not less, and a damaged integer may have no float


def read_attempts(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the attempts of a run in order of time; an empty list without a readable record.

    Each has `launch` and `number`, which identify it; `started` and `updated` in seconds since 1970; `ending`:
    `'running'`, `'finished'`, `'stopped'` by a signal or because another node left, `'failed'` or `'hang'`;
    `first_batch` and `batch`, the batches done at its start and its end; and `seconds` for each of
    `composer_dist.progress.PARTS` and for `'hang'`, the time without progress before it failed. They add up to the time
    from `started` to `updated`. From a launcher it also has `ranks`, the seconds per batch of its ranks, and
    `stragglers`.
    """
    try:
        found = _parse(Path(folder, FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeError):
        return []
    return sorted(found or [], key=lambda each: each["started"])


def _parse(text: str) -> list[dict[str, Any]] | None:
    """Return the attempts that are whole, or `None` if the file is not a record."""
    try:
        found: Any = json.loads(text)["attempts"]
        return [cast("dict[str, Any]", each) for each in found if _is_whole(each)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_whole(attempt: Any) -> bool:
    if not isinstance(attempt, dict) or not isinstance(attempt.get("seconds"), dict) or "launch" not in attempt:
        return False
    known = cast("dict[str, Any]", attempt)
    numbers = [*map(known.get, ("started", "updated", "first_batch", "batch")), *known["seconds"].values()]
    return all(isinstance(number, int | float) and abs(number) < _LARGEST for number in numbers)


def write_attempt(folder: str | os.PathLike[str], attempt: Mapping[str, Any]) -> None:
    """Write an attempt to the record, in place of its earlier state. One process may do so at a time.

    A file that is not a record is kept as `attempts.json.damaged`.

    Raises:
        OSError: If the file cannot be read or written.
    """
    path, others = Path(folder, FILE), list[dict[str, Any]]()
    if path.exists():
        found = _parse(path.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            path.replace(path.with_name(f"{FILE}.damaged"))
        own = attempt["launch"], attempt["number"]
        others = [each for each in found or () if (each["launch"], each.get("number")) != own]
    unfinished = Path(folder, f".{FILE}.unfinished")
    unfinished.write_text(json.dumps({"version": 1, "attempts": [*others, attempt]}, indent=1), encoding="utf-8")
    unfinished.replace(path)  # atomic, so that a kill leaves a whole file


def write_attempt_of_rank(
    folder: str | os.PathLike[str],
    times_s: Sequence[float],
    batches: Sequence[int],
    seconds: Mapping[str, float],
    ending: str,
) -> None:
    """Write the attempt of this process, which has no launcher.

    Args:
        folder: The folder of the run.
        times_s: When it began, and now, in seconds since 1970. Their difference must not include steps of the clock.
        batches: The batches done at its start, and until now.
        seconds: The time of each part, apart from `'start'`, which is the rest.
        ending: As in `read_attempts`.

    Raises:
        OSError: If the file cannot be written.
    """
    started_s, updated_s = times_s
    rest = max(0.0, updated_s - started_s - sum(seconds.values()))
    write_attempt(
        folder,
        {
            "launch": f"{os.getpid()}-{started_s}",  # each process by itself, as others are not known to belong to it
            "number": 0,
            "started": started_s,
            "updated": updated_s,
            "ending": ending,
            "first_batch": batches[0],
            "batch": batches[1],
            "seconds": {"start": rest, **seconds},
        },
    )
