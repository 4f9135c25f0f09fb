"""The goodput of a run: the share of its time that led to trained batches, over all of its attempts."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["goodput", "summarize"]

TRAINING = "training"
# Where each part of an attempt counts. Waits for other ranks cannot be told from the backward pass in which they are.
_KINDS = {
    "train": TRAINING,
    "backward": TRAINING,
    "collective": TRAINING,
    "optimizer": TRAINING,
    "start": "start",
    "data": "waiting for data",
    "callbacks": "callbacks",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "hang": "no progress",
}
_REPEATED, _RESTARTS, _OTHER = "training that was lost", "restarts", "other"
KINDS = tuple(dict.fromkeys([TRAINING, _REPEATED, "start", _RESTARTS, *_KINDS.values(), _OTHER]))
"""Where the time of a run goes, in the order of the page."""


def goodput(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the goodput of a run from the result of `read_attempts`, ready for JSON.

    The kinds add up to the time between the first and the last moment of the launches of the run; the time between
    two launches is not part of it. Batches that a later attempt trained again, since it resumed from an earlier
    checkpoint, are lost: their attempt's training time counts in proportion.

    Returns:
        `None` without attempts; otherwise `share` (of training, 0 to 1), `total_s`, `seconds` of each kind,
        `num_attempts`, `num_launches`, `between_launches_s`, `lost_batches`, and `stragglers` of all attempts;
        from the last attempt that has them `ranks`, the seconds per batch of its ranks, `num_compared` of
        `world_size` ranks.
    """
    if not attempts:
        return None
    lost = _lost(attempts)
    seconds = dict.fromkeys(KINDS, 0.0)
    for attempt, num_lost in zip(attempts, lost, strict=True):
        of_attempt = _by_kind(attempt)
        if num_lost:
            of_attempt[_REPEATED] = of_attempt[TRAINING] * num_lost / (attempt["batch"] - attempt["first_batch"])
            of_attempt[TRAINING] -= of_attempt[_REPEATED]
        for kind, spent in of_attempt.items():
            seconds[kind] += spent
    between_launches_s = 0.0
    for before, after in pairwise(attempts):
        gap_s = max(0.0, float(after["started"]) - float(before["updated"]))
        if before["launch"] == after["launch"]:
            seconds[_RESTARTS] += gap_s
        else:
            between_launches_s += gap_s
    total_s = sum(seconds.values())
    compared = [attempt for attempt in attempts if attempt.get("ranks")]
    return {
        "share": seconds[TRAINING] / total_s if total_s else 0.0,
        "total_s": total_s,
        "seconds": seconds,
        "num_attempts": len(attempts),
        "num_launches": len({attempt["launch"] for attempt in attempts}),
        "between_launches_s": between_launches_s,
        "lost_batches": sum(lost),
        **({name: compared[-1][name] for name in ("ranks", "num_compared", "world_size")} if compared else {}),
        "stragglers": [straggler for attempt in attempts for straggler in attempt.get("stragglers", ())],
    }


def _by_kind(attempt: Mapping[str, Any]) -> dict[str, float]:
    seconds = dict.fromkeys(KINDS, 0.0)
    for part, spent in attempt["seconds"].items():
        seconds[_KINDS.get(part, _OTHER)] += float(spent)
    return seconds


def summarize(found: Mapping[str, Any]) -> str:
    """Return a sentence about the goodput of a run."""
    total_s = found["total_s"]
    losses = {kind: spent for kind, spent in found["seconds"].items() if kind != TRAINING and spent >= 0.0005 * total_s}
    ordered = sorted(losses, key=lambda kind: -losses[kind])
    listed = ", ".join(f"{kind} {100 * losses[kind] / total_s:.1f} %" for kind in ordered)
    after = f"; {listed}" if listed else ""
    return f"goodput {100 * found['share']:.1f} % of {_duration(total_s)} in {_attempts(found)}{after}"


def _attempts(found: Mapping[str, Any]) -> str:
    number = found["num_attempts"]
    return f"{number} attempt{'s' if number > 1 else ''}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _lost(attempts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return how many batches of each attempt were trained again by a later one."""
    lost: list[int] = []
    resumed_at: float = float("inf")  # the earliest batch from which a later attempt went on
    for attempt in reversed(attempts):
        first, last = attempt["first_batch"], attempt["batch"]
        lost.append(int(max(0, last - max(first, resumed_at))) if last > first else 0)
        if last > first:  # others ended before they had trained, and may not have known where
            resumed_at = min(resumed_at, first)
    return lost[::-1]
