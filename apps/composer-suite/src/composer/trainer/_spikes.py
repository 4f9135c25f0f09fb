"""Losses that jump."""

import math
from collections import deque
from statistics import median

_NUM_USUAL = 32  # among which the median is what a loss usually is
_FEWEST = 3  # before which nobody knows what is usual


class Spikes:
    """Tells a loss that jumps from those that are as usual.

    Args:
        factor: How many times as large as the median of the latest usual ones it is.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._usual: deque[float] = deque(maxlen=_NUM_USUAL)

    def is_spike(self, loss: float) -> bool:
        """Return whether a loss jumps; one that does not counts as usual from now on, unless it is not finite."""
        if not math.isfinite(loss):
            return False
        if len(self._usual) >= _FEWEST and abs(loss) > self._factor * median(self._usual):
            return True
        self._usual.append(abs(loss))
        return False
