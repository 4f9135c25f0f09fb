"""The decision which rank of a run without progress is stuck, where, and which ranks only wait for it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from composer_dist.launch.stacks import Stack
from composer_dist.progress import RankProgress

Calls: TypeAlias = dict[str, dict[int, dict[str, Any]]]
NOT_BEGUN = "before its training"
_UNFINISHED = ("start", "data", "train", "optimizer", "callbacks", "evaluation", "checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of one rank of a run without progress, as plain values that nodes can exchange.

    Attributes:
        rank: The global rank.
        idle_s: Seconds since its last progress.
        where: Its event and batch, as in `batch_end of batch 3`.
        phase: Its phase, one of `composer_dist.progress.PHASES`.
        batch: Batches done.
        exit_code: Its exit code if it has ended.
        is_suspended: Whether it is suspended.
        collective: The operation in which it waits according to its stack, or `None`.
        doing: What it does otherwise, as a verb phrase.
        is_compiling: Whether its stack is inside a compiler.
        is_unknown: Whether its node's launcher has not sent its stack.
        calls: Its last collectives in each process group by number, from torch's flight recorder.
    """

    rank: int
    idle_s: float
    where: str
    phase: str
    batch: int
    exit_code: int | None = None
    is_suspended: bool = False
    collective: str | None = None
    doing: str = ""
    is_compiling: bool = False
    is_unknown: bool = False
    calls: "Calls" = field(default_factory=dict[str, dict[int, dict[str, Any]]])

    @property
    def is_active(self) -> bool:
        """Return whether it runs code outside collectives."""
        return self.collective is None and self.phase != "between"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "View":
        """Return the view from its fields after a conversion to JSON, whose keys are texts."""
        calls = {
            name: {int(number): entry for number, entry in found.items()} for name, found in values["calls"].items()
        }
        return cls(**{**values, "calls": calls})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks that are stuck, and the others.

    Attributes:
        stuck: What each stuck rank does, in words that follow `rank N`.
        waiting: The same for the ranks that wait for them.
        cause: A sentence about a disagreement between ranks, or an empty text.
    """

    stuck: Mapping[int, str]
    waiting: Mapping[int, str]
    cause: str = ""


def view(
    rank: int,
    progress: RankProgress,
    idle_s: float,
    stack: Stack | None,
    collectives: Sequence[Mapping[str, Any]],
    exit_code: int | None,
) -> View:
    """Return the view of a rank."""
    calls: Calls = {}
    for entry in collectives:
        calls.setdefault(" ".join(map(str, entry["group"])), {})[entry["sequence"]] = dict(entry)
    return View(
        rank=rank,
        idle_s=idle_s,
        where=describe_place(progress),
        phase=progress.phase if progress.pid else "start",
        batch=progress.batch,
        exit_code=exit_code,
        is_suspended=stack is not None and stack.is_suspended,
        collective=None if stack is None else stack.collective,
        doing="" if stack is None else _doing(stack, progress),
        is_compiling=stack is not None and stack.is_compiling,
        calls=calls,
    )


def decide(views: Sequence[View]) -> Verdict:
    """Return which ranks are stuck.

    A rank is stuck if it has ended, is suspended, or runs code outside a collective while others wait in one. If all
    wait in collectives, those are stuck of which nothing is known. Otherwise the last collectives of the ranks are
    compared: different operations, shapes, or numbers of them.
    """
    running = [each for each in views if each.exit_code is None]
    suspended = [each for each in running if each.is_suspended]
    unknown = [each for each in running if each.is_unknown]
    awake = [each for each in running if not each.is_suspended and not each.is_unknown]
    active = [each for each in awake if each.is_active]
    # On a GPU, a rank that waits for its device is not inside a collective, which its device waits in.
    if stuck := left(views) + suspended or [each for each in active if not _waits_for_another(each, views)] or unknown:
        return _verdict(stuck, views)
    cause, minority = compare_collectives(awake)
    odd = [each for each in awake if each.rank in minority]
    return _verdict(odd or (awake if cause else active or awake), views, cause)


def left(views: Sequence[View]) -> list[View]:
    """Return the ranks that ended while others still trained. One that has finished may end before the others."""
    behind = min((each.batch for each in views if each.exit_code is None), default=0)
    return [each for each in views if each.exit_code is not None and (each.phase in _UNFINISHED or each.batch < behind)]


def compare_collectives(views: Sequence[View]) -> tuple[str, set[int]]:
    """Return a sentence about the first difference between the collectives of ranks, and the ranks of the minority.

    The sentence is empty without a difference, and the set without a minority.
    """
    for group in dict.fromkeys(name for each in views for name in each.calls):
        calls = {each.rank: each.calls[group] for each in views if each.calls.get(group)}
        if len(calls) < 2:
            continue
        # Those before the first number that all ranks still know cannot be compared.
        first = max(min(numbers) for numbers in calls.values())
        for number in range(first, max(max(numbers) for numbers in calls.values()) + 1):
            called = {rank: numbers[number] for rank, numbers in calls.items() if number in numbers}
            if found := _compare_call(called, sorted(set(calls) - set(called))):
                return found
    return "", set()


def _compare_call(called: Mapping[int, dict[str, Any]], missing: Sequence[int]) -> tuple[str, set[int]] | None:
    """Return the difference between the collectives of one number, by rank, or `None`."""
    kinds = Counter(map(_signature, called.values()))
    if len(kinds) > 1:
        listed = "; ".join(f"rank {rank}: {describe_call(entry)}" for rank, entry in sorted(called.items()))
        (common, count), (_, second) = kinds.most_common(2)
        odd = {rank for rank, entry in called.items() if _signature(entry) != common}
        return f"the ranks called different collectives: {listed}", odd if count > second else set()
    if missing and not all(entry["is_done"] for entry in called.values()):
        ranks, others = (", ".join(map(str, each)) for each in (missing, sorted(called)))
        call = describe_call(next(iter(called.values())))
        return f"not all ranks called {call}: ranks {others} did, ranks {ranks} did not", set(missing)
    return None


def _waits_for_another(each: View, views: Sequence[View]) -> bool:
    """Return whether a rank has called a collective that is not done, and another rank none or another one yet."""
    for name, numbers in each.calls.items():
        others = [other.calls[name] for other in views if other.calls.get(name)]
        for number, entry in numbers.items():
            if not entry["is_done"] and any(
                max(other) < number or _signature(other.get(number, entry)) != _signature(entry) for other in others
            ):
                return True
    return False


def _signature(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    one_sided = entry["name"].rpartition(":")[2] in ("scatter", "gather", "reduce", "send", "recv")
    return (entry["name"],) if one_sided else (entry["name"], str(entry["shapes"]), str(entry["dtypes"]))


def describe_call(entry: Mapping[str, Any]) -> str:
    """Return a collective's name, number, dtypes and shapes."""
    name, state = str(entry["name"]).rpartition(":")[2], "done" if entry["is_done"] else "not done"
    what = ", ".join(f"{dtype} {shape}" for dtype, shape in zip(entry["dtypes"], entry["shapes"], strict=False))
    return f"{name} number {entry['sequence']} of {what} ({state})"


def _verdict(stuck: Sequence[View], views: Sequence[View], cause: str = "") -> Verdict:
    ranks = {each.rank for each in stuck}
    others = [each for each in views if each.rank not in ranks and each.exit_code is None]
    return Verdict(
        {each.rank: _describe(each) for each in stuck}, {each.rank: _describe(each) for each in others}, cause
    )


def _describe(each: View) -> str:
    if each.exit_code is not None:
        return f"ended with exit code {each.exit_code} {each.where}, while other ranks still trained"
    if each.is_suspended:
        return f"is suspended (SIGSTOP) {each.where}"
    if each.is_unknown:
        return f"{each.doing} {each.where}".rstrip()
    if each.collective is not None:
        entries = [entry for numbers in each.calls.values() for entry in numbers.values() if not entry["is_done"]]
        call = f": {describe_call(entries[-1])}" if entries else ""
        return f"waits in {each.collective} {each.where}{call}"
    return f"{each.doing or 'made no progress'} {each.where}"


def describe_place(progress: RankProgress) -> str:
    """Return the event and the batch of a rank."""
    if not progress.pid:
        return NOT_BEGUN
    if not progress.event:
        return "at the start"
    side = "on" if progress.is_inside_event else "after"
    return f"{side} {progress.event} of batch {progress.batch}"


def _doing(stack: Stack, progress: RankProgress) -> str:
    frame = stack.own_frame
    if frame is None:
        state = "" if stack.state is None else f" (state {stack.state})"
        return f"did not write its stack{state}"
    if stack.waits_for_worker:
        workers = "".join(f"; worker PID {pid} is in {inner}" for pid, inner in stack.workers)
        return f"waits for a worker of its dataloader{workers}"
    activity = {"R": "is running", "D": "waits for a disk or a device"}.get(stack.state or "", "is waiting")
    if stack.waits_for_lock:
        activity = "waits for another thread"
    is_save = progress.phase == "checkpoint" and progress.event not in ("fit_end", "close")
    what = " in a save or a load" if is_save else ""
    inner = "" if frame == stack.frames[0] else f", inside {stack.frames[0]}"
    return f"{activity}{what} in {frame}{inner}"
