"""How long a training batch took, evaluation excluded."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measures batches one after the other: a batch lasts from the end of the one before to its own end."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    def start_batch(self) -> None:
        """Begin to count now; what came before belongs to no batch."""
        self._started_s = time.perf_counter()

    def end_batch_s(self) -> float:
        """Return how many seconds the batch that ends now has taken, and begin the next one."""
        started_s, self._started_s = self._started_s, time.perf_counter()
        return self._started_s - started_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the batch that is being measured."""
        paused_s = time.perf_counter()
        try:
            yield
        finally:
            self._started_s += time.perf_counter() - paused_s
