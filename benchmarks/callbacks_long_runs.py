"""What callbacks and loggers add late in a long run, beside what they add early, and a budget for each.

    python benchmarks/callbacks_long_runs.py [--quick] [--rounds N]

A step takes next to nothing, so that what is added is most of it: the ratio to a run without over the last quarter,
beside that over the first; and the memory that the callbacks hold at the end, beside what they held at first. A logger
that keeps everything, such as the one in memory, grows by what it is for, and is left out.
The exit status is 1 if a budget is broken.
"""

import argparse
import statistics
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import torch
from rows import Row, add_option, write
from watched_training import BLOCK, Sink, loggers, make_batches, make_trainer, ten_callbacks, timed

import composer.callbacks
from composer.core import Callback

GROWTH_BUDGET = 1.10  # of a step that is all overhead
MEMORY_BUDGET_BYTES = 16 * 1024


class Tally(Callback):
    """Asks twice what memory the callbacks' own code holds."""

    def __init__(self, *batches: int) -> None:
        self.batches, self.sizes_bytes = batches, []

    def batch_end(self, state: Any, logger: Any) -> None:
        """Ask, if it is time."""
        if int(state.timestamp.batch) in self.batches:
            folder = str(Path(composer.callbacks.__file__).parent / "*")
            held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, folder)])
            self.sizes_bytes.append(sum(trace.size for trace in held.traces))


def measure_growth(rounds: int, blocks: int) -> Row:
    """Compare what is added late in a long run with what is added early; print and judge as above."""
    batches = make_batches(True, 2)
    early: list[float] = []
    late: list[float] = []
    part = max(blocks // 4, 1)
    for _ in range(rounds):
        without_s, _ = timed(batches, (blocks + 1) * BLOCK, is_watched=False, keeps_all=False)
        with_s, _ = timed(batches, (blocks + 1) * BLOCK, is_watched=True, keeps_all=False)
        ratios = [with_ / without for with_, without in zip(with_s[1:], without_s[1:], strict=True)]
        early += ratios[:part]
        late += ratios[-part:]
    early_ratio, late_ratio = statistics.median(early), statistics.median(late)
    growth = late_ratio / early_ratio
    print(f"{'a run of ' + str((blocks + 1) * BLOCK) + ' steps':32}{'early':>10}{'late':>10}{'growth':>8}{'budget':>8}")
    print(f"{'ratio, of an empty step':32}{early_ratio:10.2f}{late_ratio:10.2f}{growth:8.2f}{GROWTH_BUDGET:8.2f}")
    return Row(
        what="what they add to an empty step late in a run, to early",
        ours=late_ratio,
        plain=early_ratio,
        unit="",
        ratio=growth,
        budget=f"{GROWTH_BUDGET:.2f}",
        is_met=growth <= GROWTH_BUDGET,
    )


def measure_memory(steps: int) -> Row:
    """Compare what memory the callbacks hold late with what they hold early; print and judge as above."""
    tally = Tally(4 * BLOCK, steps)
    tracemalloc.start()
    destinations = loggers(Sink(), keeps_all=False)
    trainer, _ = make_trainer(make_batches(True, 2), steps, [*ten_callbacks(), tally], destinations)
    with trainer:
        trainer.fit()
    tracemalloc.stop()
    early, late = tally.sizes_bytes
    print(f"{'held by callbacks, bytes':32}{early:10}{late:10}{late - early:8}{MEMORY_BUDGET_BYTES:8}")
    return Row(
        what="memory by which ten callbacks grow in a long run",
        ours=late - early,
        unit="bytes",
        budget=f"{MEMORY_BUDGET_BYTES} bytes",
        is_met=late - early <= MEMORY_BUDGET_BYTES,
    )


def main() -> int:
    """Measure, print the tables and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure what callbacks and loggers add late in a long run.")
    parser.add_argument("--quick", action="store_true", help="a short look, for a machine that is otherwise idle")
    parser.add_argument("--rounds", type=int, default=None, help="runs of the first table")
    add_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds = asked.rounds or (3 if asked.quick else 7)
    rows = [measure_growth(rounds, 8 if asked.quick else 40), measure_memory(1000 if asked.quick else 3000)]
    write(asked.json, rows)
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
