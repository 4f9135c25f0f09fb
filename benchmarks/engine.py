"""How long one `Engine.run_event` takes, by the number of algorithms and of callbacks, installed and listening.

    python benchmarks/engine.py [--plain]

Prints medians in microseconds. Hooks do nothing. In the second table ten callbacks are installed. The state is a
`composer_events.State` where PyTorch is installed, else (or with `--plain`) a plain object with plain lists.
"""

import argparse
import statistics
import timeit
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rows import Row, add_option, write

from composer_events import Algorithm, Callback, Engine, Event, Logger
from composer_time import Timestamp

CALLS, REPEATS = 2_000, 25


class Agree(Algorithm):
    """Match every event and do nothing."""

    def match(self, event: Any, state: Any) -> bool:
        """Answer yes."""
        return True

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        """Do nothing."""


class Decline(Agree):
    """Match no event."""

    def match(self, event: Any, state: Any) -> bool:
        """Answer no."""
        return False


class Deaf(Callback):
    """Listen to another event than the one that is timed."""

    def fit_end(self, state: Any, logger: Any) -> None:
        """Do nothing."""


class Listening(Callback):
    """Listen to the event that is timed."""

    def batch_start(self, state: Any, logger: Any) -> None:
        """Do nothing."""


def make_state(plain: bool) -> tuple[Any, str]:
    """Return a state that is ready to run, and what kind it is."""
    if not plain:
        try:
            import torch

            from composer_events import State
        except ImportError:
            pass
        else:
            torch.set_num_threads(1)
            loader = torch.utils.data.DataLoader(list(range(4)))
            state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", rank_zero_seed=0, dataloader=loader)
            return state, "State"
    state = SimpleNamespace(
        algorithms=[], callbacks=[], timestamp=Timestamp(), dataloader=[1], max_duration="1ep", profiler=None
    )
    return state, "plain object"


def time_hooks(plain: bool, algorithms: Sequence[Algorithm], callbacks: Sequence[Callback]) -> float:
    """Return the median time of one call over a state with these hooks."""
    state, _ = make_state(plain)
    state.algorithms.extend(algorithms)
    state.callbacks.extend(callbacks)
    engine = Engine(state, Logger(state))
    time_us = median_us(engine)
    engine.close()
    return time_us


def median_us(engine: Engine) -> float:
    """Return the median time of one call."""
    names = {"run_event": engine.run_event, "event": Event.BATCH_START}
    times = timeit.repeat("run_event(event)", globals=names, number=CALLS, repeat=REPEATS)
    return statistics.median(times) / CALLS * 1e6


def main() -> None:
    """Time each combination and print a table."""
    parser = argparse.ArgumentParser(description="Time Engine.run_event.")
    parser.add_argument("--plain", action="store_true", help="use a plain object with plain lists as the state")
    add_option(parser)
    arguments = parser.parse_args()
    plain = arguments.plain
    print(f"microseconds per run_event, medians of {REPEATS} x {CALLS} calls, {make_state(plain)[1]}")
    write(arguments.json, [*print_installed(plain), *print_listening(plain)])


def print_installed(plain: bool) -> list[Row]:
    """Time an event that nobody listens to, by the number of callbacks there are."""
    print(f"{'no algorithm, none of':>22} {'0 callbacks':>15} {'10':>10} {'100':>10}")
    cells = [time_hooks(plain, [], [Deaf() for _ in range(count)]) for count in (0, 10, 100)]
    print(f"{'them listens':>22} {cells[0]:15.2f} {cells[1]:10.2f} {cells[2]:10.2f}")
    return [Row(what="Engine.run_event, 10 callbacks, none of which listens", ours=cells[1], unit="us")]


def print_listening(plain: bool) -> list[Row]:
    """Time an event by the number of algorithms that match and of callbacks that listen."""
    print(f"{'algorithms':>22} {'0 of 10 listen':>15} {'1 of 10':>10} {'10 of 10':>10}")
    rows: list[Row] = []
    for count, kind in ((0, Agree), (10, Decline), (28, Decline), (10, Agree), (28, Agree)):
        cells: list[float] = []
        for listening in (0, 1, 10):
            callbacks = [Listening() for _ in range(listening)] + [Deaf() for _ in range(10 - listening)]
            cells.append(time_hooks(plain, [kind() for _ in range(count)], callbacks))
        label = f"{count}, all match" if kind is Agree and count else f"{count}, none match" if count else "0"
        print(f"{label:>22} {cells[0]:15.2f} {cells[1]:10.2f} {cells[2]:10.2f}")
        what = f"Engine.run_event, algorithms: {label}; 1 callback of 10 listens"
        rows.append(Row(what=what, ours=cells[1], unit="us"))
    return rows


if __name__ == "__main__":
    main()
