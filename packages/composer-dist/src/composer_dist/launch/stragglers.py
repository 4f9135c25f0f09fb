"""Comparison of the time of this node's ranks, and the search for a rank that the others wait for.

In data-parallel training all batches take equally long on all ranks, so the time of a batch shows nothing. A slow rank
is the one that works longest between the collectives, which is known from its time in each part outside them: data,
forward pass and loss, optimizer, and hooks. The backward pass is left out: there DDP and FSDP wait for other ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from composer_dist.progress import PARTS, RankProgress

_WORK = ("data", "train", "optimizer", "callbacks")
_FOR_ALL = ("evaluation", "checkpoint")  # which one rank may do for all, while the others wait in a part of their work
_NAMES = {
    "data": "reading data",
    "train": "the forward pass",
    "optimizer": "the optimizer",
    "callbacks": "algorithms, callbacks and loggers",
}
_FACTOR = 2.0  # of the median of the other ranks
_SHARE = 0.2  # of the time of a batch, at least
_LEAST_S = 0.001  # per batch; less is noise of the machine, and costs little
_WINDOW_S = 2.0
_WINDOW_BATCHES = 5
_NUM_WINDOWS = 5  # in a row, so that neither one slow batch nor the first ones count

Work = Mapping[int, Mapping[str, float]]
"""Seconds per batch of each part, by rank."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: The global rank.
        cause: The part of a batch in which it is slower: `'data'`, `'train'`, `'optimizer'` or `'callbacks'`.
        seconds: What it needs for that part of a batch.
        others: The median of the other ranks.
        batch: The batch at which it was found.
    """

    rank: int
    cause: str
    seconds: float
    others: float
    batch: int

    @property
    def factor(self) -> float:
        """The ratio of the two."""
        return self.seconds / max(self.others, 1e-6)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow, and the other ranks wait for it: {_NAMES[self.cause]} takes "
            f"{1000 * self.seconds:.3g} ms of each of its batches, {_times(self.factor)} as long as on the other ranks "
            f"({1000 * self.others:.3g} ms)"
        )


@dataclass(slots=True)
class Stragglers:
    """The search in one attempt.

    Attributes:
        num_ranks: The ranks of this node, all of which are compared.
        found: The stragglers so far, each rank and cause once.
    """

    num_ranks: int
    found: list[Straggler] = field(default_factory=list[Straggler])
    _first: dict[int, RankProgress] = field(default_factory=dict[int, RankProgress], init=False)
    _last: dict[int, RankProgress] = field(default_factory=dict[int, RankProgress], init=False)
    _window: dict[int, RankProgress] = field(default_factory=dict[int, RankProgress], init=False)
    _suspects: dict[int, list[str]] = field(default_factory=dict[int, list[str]], init=False)

    def look(self, ranks: Sequence[RankProgress]) -> list[Straggler]:
        """Take the progress of the ranks, and return new stragglers."""
        now = {each.rank: each for each in ranks}
        if len(now) < max(2, self.num_ranks):
            return []
        if not self._first or any(_is_another_training(self._last[rank], each) for rank, each in now.items()):
            if any(each.phase in ("start", "between") or each.batch == each.first_batch for each in now.values()):
                return []  # the first batch may compile and load
            self._first = self._window = now
            self._suspects = {}
        self._last = now
        passed_s = min(each.time_s - self._window[rank].time_s for rank, each in now.items())
        batches = min(each.batch - self._window[rank].batch for rank, each in now.items())
        if passed_s < _WINDOW_S or batches < _WINDOW_BATCHES:
            return []
        work, self._window = _per_batch(self._window, now), now
        return self._judge(work, max(each.batch for each in now.values()))

    def table(self) -> dict[str, dict[str, float]]:
        """Return the least, the median and the most seconds per batch of each part, and the rank with the most."""
        if not self._first:
            return {}
        work = _per_batch(self._first, self._last)
        if not work:
            return {}
        return {
            part: {
                "min": min(seconds),
                "median": median(seconds),
                "max": max(seconds),
                "slowest_rank": max(work, key=lambda rank: work[rank][part]),
            }
            for part in PARTS
            if any(seconds := [work[rank][part] for rank in work])
        }

    def _judge(self, work: Work, batch: int) -> list[Straggler]:
        causes = find_slow(work)
        self._suspects = {rank: [*self._suspects.get(rank, ()), cause] for rank, cause in causes.items()}
        new: list[Straggler] = []
        for rank, seen in self._suspects.items():
            cause = Counter(seen[-_NUM_WINDOWS:]).most_common(1)[0][0]
            if len(seen) < _NUM_WINDOWS or any((each.rank, each.cause) == (rank, cause) for each in self.found):
                continue
            others = median(work[other][cause] for other in work if other != rank)
            new.append(Straggler(rank, cause, work[rank][cause], others, batch))
        self.found += new
        return new


def find_slow(work: Work) -> dict[int, str]:
    """Return the slow ranks of a window, each with the part in which it is slower than the others.

    No rank waits for another one while it reads data, so data counts by itself. A hook or a forward pass may wait in a
    collective of its own; the rank that it waits for then works as long in another part, evaluates, or saves, so only
    the sum shows who is slow.
    """
    found: dict[int, str] = {}
    step_s = max((sum(parts.values()) for parts in work.values()), default=0.0)
    for parts in (("data",), (*_WORK, *_FOR_ALL)):
        own = {rank: sum(seconds[part] for part in parts) for rank, seconds in work.items()}
        for rank, seconds in own.items():
            others = [other for other in work if other != rank]
            usual = median(own[other] for other in others)
            if seconds < _FACTOR * usual or seconds - usual < max(_SHARE * step_s, _LEAST_S):
                continue
            extra = {part: work[rank][part] - median(work[other][part] for other in others) for part in parts}
            if (cause := max(extra, key=lambda part: extra[part])) in _WORK:
                found.setdefault(rank, cause)
    return found


def _per_batch(before: Mapping[int, RankProgress], after: Mapping[int, RankProgress]) -> Work:
    """Return the seconds per batch between two looks, of ranks that have done some."""
    return {
        rank: {
            part: max(0.0, after[rank].seconds[part] - first.seconds[part]) / (after[rank].batch - first.batch)
            for part in PARTS
        }
        for rank, first in before.items()
        if after[rank].batch > first.batch
    }


def _is_another_training(before: RankProgress, after: RankProgress) -> bool:
    return before.pid != after.pid or before.first_batch != after.first_batch or after.batch < before.batch


def _times(factor: float) -> str:
    return "over 1000 times" if factor >= 1000 else f"{factor:.3g} times"
