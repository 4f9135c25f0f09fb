"""What callbacks and loggers add to a step of training: ratios to one without them, and a budget for each.

    python benchmarks/callbacks.py [--quick] [--turns N]

Ten callbacks and three loggers watch a network whose step takes about 10 ms of one thread. Within one training they
take turns with nobody, 13 steps each, so that both meet the same machine, network and memory. What is compared is the
training thread's processor time: what others do beside it delays no step. The metric of each batch is computed in
either case. The weights must come out equal to those of a training that nobody watches.

A step has two parts. Forward and backward passes are most of it and vary by a tenth from step to step, far more than is
to be measured; what watching does to them, through the processor's caches, is the mean of the differences between a
turn and its neighbors. The rest is where the watchers act. Steps differ there, as some act at every 10th or 100th and
the progress bar is drawn twice a second, so each kind of step has its median, which counts as often as the kind occurs.

`ActivationMonitor` computes statistics of all that a network computes, and what it adds is up to how often it looks: a
row of its own has the time of one look, in steps.

The exit status is 1 if a budget is broken.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rows import Row, add_option, write
from watched_training import BLOCK, Sink, loggers, make_batches, make_trainer, ten_callbacks, timed

from composer.callbacks import ActivationMonitor
from composer.core import Callback
from composer.loggers import InMemoryLogger, LoggerDestination

STEP_S = 0.010
STEPS_IN_TURN = 13
WARMUP_TURNS = 20
LEAST_TURNS = 2 * WARMUP_TURNS
LOOK_EVERY = 10  # steps
STEP_BUDGET = 1.02
LOOK_BUDGET = 0.5  # of a step


def calibrate() -> int:
    """Return the batch size at which a step takes about as long as is asked for."""
    size = 256
    for _ in range(8):  # time is not quite proportional, and the machine not quite even
        blocks_s, _ = timed(make_batches(False, size), 3 * BLOCK, is_watched=False, keeps_all=False)
        step_s = statistics.median(blocks_s) / BLOCK
        if abs(step_s / STEP_S - 1) < 0.03:
            break
        size = max(round(size * STEP_S / step_s), 1)
    return size


class Passes:
    """Two callbacks, one before and one after all others, that time the forward and backward passes.

    Attributes:
        around: Those.
        time_s: Of the passes since somebody set it to zero.
    """

    def __init__(self) -> None:
        self.time_s = self._start_s = 0.0
        begin, end = Callback(), Callback()
        end.before_forward = end.before_backward = self._begin
        begin.after_forward = begin.after_backward = self._end
        self.around = begin, end

    def _begin(self, state: Any, logger: Any) -> None:
        self._start_s = time.thread_time()

    def _end(self, state: Any, logger: Any) -> None:
        self.time_s += time.thread_time() - self._start_s


@dataclass
class Step:
    """What one step took of the training thread's time."""

    turn: int
    kind: str
    in_passes_s: float
    elsewhere_s: float


class TakesTurns:
    """A dataloader that lets the callbacks and loggers of its reader rest in every other turn, and times the steps.

    The first step of a turn, which pays for the change, is not counted.

    Attributes:
        watch: Is told whether they are to listen to the batches that follow.
        passes: Time a part of each step.
        kind_of: Answers what kind of step that of a number was.
        plain: The steps without them.
        watched: The steps with them.
    """

    def __init__(self, batches: list[Any], turns: int, passes: Passes, kind_of: Callable[[int], str]) -> None:
        self.batches, self.turns, self.passes, self.kind_of = batches, turns, passes, kind_of
        self.watch: Callable[[bool], None] = lambda is_watched: None
        self.plain: list[Step] = []
        self.watched: list[Step] = []

    def __len__(self) -> int:
        return 2 * self.turns * STEPS_IN_TURN

    def __iter__(self) -> Iterator[Any]:
        step = 0
        for turn in range(2 * self.turns):
            is_watched = turn % 2 == 1
            self.watch(is_watched)
            for index in range(STEPS_IN_TURN):
                self.passes.time_s, start_s = 0.0, time.thread_time()
                yield self.batches[step % len(self.batches)]
                taken_s = time.thread_time() - start_s
                step += 1
                kind, in_passes_s = self.kind_of(step), self.passes.time_s
                if index > 0 and turn >= WARMUP_TURNS:
                    (self.watched if is_watched else self.plain).append(
                        Step(turn, kind, in_passes_s, taken_s - in_passes_s)
                    )

    def added_to_passes_s(self) -> float:
        """Return how much longer the passes take in a watched turn than in those around it, in the mean.

        A tenth of the turns, at either end, is not counted.
        """
        of_turns: dict[int, list[float]] = {}
        for step in self.plain + self.watched:
            of_turns.setdefault(step.turn, []).append(step.in_passes_s)
        longer = sorted(
            statistics.median(times_s) - statistics.median(of_turns[turn - 1] + of_turns.get(turn + 1, []))
            for turn, times_s in of_turns.items()
            if turn % 2 == 1
        )
        tenth = len(longer) // 10
        return statistics.mean(longer[tenth : len(longer) - tenth])

    def added_elsewhere_s(self) -> float:
        """Return how much longer the rest of a step takes when watched."""
        usual_s = statistics.median(step.elsewhere_s for step in self.plain)
        kinds: dict[str, list[float]] = {}
        for step in self.watched:
            kinds.setdefault(step.kind, []).append(step.elsewhere_s)
        longer_s = sum(len(times_s) * (statistics.median(times_s) - usual_s) for times_s in kinds.values())
        return longer_s / len(self.watched)


class Memory(InMemoryLogger):
    """Says when it takes what was logged, which is many calls at a time.

    Attributes:
        has_taken: Whether it took something since somebody said otherwise.
    """

    has_taken = False

    def take_metrics(self, logged: Sequence[Any]) -> None:
        """Take it."""
        self.has_taken = True
        super().take_metrics(logged)


def take_turns(
    batches: list[Any],
    turns: int,
    callbacks: Sequence[Callback],
    destinations: Sequence[LoggerDestination],
    kind_of: Callable[[int], str],
) -> TakesTurns:
    """Train with and without callbacks and loggers by turns, and return the steps."""
    passes = Passes()
    first, last = passes.around
    loader = TakesTurns(batches, turns, passes, kind_of)
    everybody = [first, *callbacks, last]
    trainer, network = make_trainer(batches, len(loader), everybody, destinations, loader)
    everybody = [callback for callback in trainer.state.callbacks if callback not in passes.around]

    def watch(is_watched: bool) -> None:
        trainer.state.callbacks = [first, *(everybody if is_watched else ()), last]
        trainer.logger.destinations = destinations if is_watched else []

    loader.watch = watch
    with trainer:
        trainer.fit()
    plain, same_network = make_trainer(batches, len(loader), [], [])
    with plain:
        plain.fit()
    if not all(map(torch.equal, network.parameters(), same_network.parameters())):
        raise AssertionError("What watches training has changed the weights.")
    return loader


def measure_step(batches: list[Any], turns: int) -> Row:
    """Compare steps of 10 ms with and without callbacks and loggers, print the ratio and judge it."""
    sink, memory = Sink(), Memory()

    def kind_of(step: int) -> str:
        kind = "drawn" if sink.is_touched else "handed over" if memory.has_taken else "usual"
        sink.is_touched = memory.has_taken = False
        return "0 of 100" if step % 100 == 0 else "0 of 10" if step % 10 == 0 else kind

    steps = take_turns(batches, turns, ten_callbacks(), [*loggers(sink, keeps_all=False), memory], kind_of)
    step_s = statistics.median(step.in_passes_s + step.elsewhere_s for step in steps.plain)
    in_passes_s, elsewhere_s = steps.added_to_passes_s(), steps.added_elsewhere_s()
    watched_s = STEP_S + in_passes_s + elsewhere_s  # whatever the machine has made of its steps since they were sized
    ratio = watched_s / STEP_S
    print(f"a step of {step_s * 1e3:.1f} ms, {turns} pairs of turns", end=", ")
    print(f"{elsewhere_s * 1e6:.0f} us added, and {in_passes_s * 1e6:.0f} us to forward and backward")
    print(f"{'':32}{'ratio':>8}{'budget':>8}\n{'ten callbacks, three loggers':32}{ratio:8.3f}{STEP_BUDGET:8.2f}")
    return Row(
        what="step of 10 ms with ten callbacks and three loggers, to one without",
        ours=watched_s * 1e3,
        plain=STEP_S * 1e3,
        ratio=ratio,
        budget=f"{STEP_BUDGET:.2f}",
        is_met=ratio <= STEP_BUDGET,
    )


def measure_look(batches: list[Any], turns: int) -> Row:
    """Compare what one look of `ActivationMonitor` adds with a step of 10 ms, print the ratio and judge it."""
    monitor = ActivationMonitor(interval=LOOK_EVERY, whole_outputs=True)
    steps = take_turns(batches, turns, [monitor], [InMemoryLogger()], lambda step: str(step % LOOK_EVERY))
    plain_s, looked_s = (
        statistics.median(step.in_passes_s + step.elsewhere_s for step in some)
        for some in (steps.plain, [step for step in steps.watched if step.kind == "1"])
    )
    ratio = looked_s / plain_s - 1
    print(f"{'a look at all activations':32}{ratio:8.3f}{LOOK_BUDGET:8.2f}")
    return Row(
        what="one look of ActivationMonitor at all layers, to a step",
        ours=(looked_s - plain_s) * 1e3,
        plain=plain_s * 1e3,
        ratio=ratio,
        budget=f"{LOOK_BUDGET:.2f}",
        is_met=ratio <= LOOK_BUDGET,
    )


def main() -> int:
    """Measure, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure what callbacks and loggers add to a step of training.")
    parser.add_argument("--quick", action="store_true", help="a short look, for a machine that is otherwise idle")
    parser.add_argument("--turns", type=int, default=None, help="with and without")
    add_option(parser)
    asked = parser.parse_args()
    if asked.turns is not None and asked.turns < LEAST_TURNS:
        parser.error(f"--turns={asked.turns} leaves nothing to compare. Take {LEAST_TURNS} or more.")
    torch.set_num_threads(1)
    turns = asked.turns or (60 if asked.quick else 300)
    batches = make_batches(False, calibrate())
    rows = [measure_step(batches, turns), measure_look(batches, turns // 2)]
    write(asked.json, rows)
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
