"""A clock of CPU-seconds that stands still while the model is evaluated."""

import time
from collections.abc import Callable

from arms import Point

from composer import Callback, Logger, State


class CpuClock(Callback):
    """Note the process's CPU-seconds of training and the quality, at each evaluation.

    The time that the process itself computed says on a busy machine, too, what a training costs, if it has one thread.
    What algorithms do to batches and what the loader does counts, since it happens in this process.

    Args:
        read_quality: Gets the quality out of a state whose metrics have just been computed.
        clock: Returns seconds.
    """

    def __init__(self, read_quality: Callable[[State], float], clock: Callable[[], float] = time.process_time) -> None:
        self.curve: list[Point] = []
        self._read_quality = read_quality
        self._clock = clock
        self._elapsed = 0.0
        self._since = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start."""
        self._since = self._clock()

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Stop."""
        self._elapsed += self._clock() - self._since

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Note a point of the curve, and go on."""
        self.curve.append((self._elapsed, self._read_quality(state)))
        self._since = self._clock()
