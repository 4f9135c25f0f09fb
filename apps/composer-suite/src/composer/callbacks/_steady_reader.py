"""Something that is read over and over on a thread of its own, so that nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from composer.loggers._trouble import warn_of_trouble

__all__ = ["SteadyReader"]

T = TypeVar("T")


class SteadyReader(Generic[T]):
    """Read at the first question, and from then on at an interval, until it is closed.

    A reading that fails ends the thread with one warning, and the last one that did not is what is known from then on.

    Args:
        what: What is read, for the warning.
        read: Reads. The first call is made by whoever asks first, and raises there.
        interval_s: How many seconds lie between two readings.

    Example:
        >>> reader = SteadyReader("the answer", lambda: 42, interval_s=1.0)
        >>> reader.latest()
        42
        >>> reader.close()
    """

    def __init__(self, what: str, read: Callable[[], T], interval_s: float) -> None:
        self._what, self._read, self._interval_s = what, read, interval_s
        self._readings: _Readings[T] | None = None

    def latest(self) -> T:
        """Return the latest reading; the thread begins with the first question."""
        if self._readings is not None:
            return self._readings.latest
        first = self._read()
        self._readings = readings = _Readings(first)
        # It knows nothing of this object, and so does not keep alive what nobody closes.
        arguments = (self._what, self._read, self._interval_s, readings)
        threading.Thread(target=_keep_reading, args=arguments, name="composer-reader", daemon=True).start()
        return first

    def close(self) -> None:
        """End the thread. The next question begins anew."""
        if self._readings is not None:
            self._readings.ends.set()
            self._readings = None

    def __del__(self) -> None:
        self.close()


class _Readings(Generic[T]):
    def __init__(self, first: T) -> None:
        self.latest = first
        self.ends = threading.Event()


def _keep_reading(what: str, read: Callable[[], T], interval_s: float, readings: _Readings[T]) -> None:
    try:
        read()  # some numbers are differences to what the same thread has read before
        while not readings.ends.wait(interval_s):
            readings.latest = read()
    except Exception as error:  # training is not about the machine it runs on
        if not readings.ends.is_set():
            warn_of_trouble(f"{what} can no longer be read, so the last reading stays: {type(error).__name__}: {error}")
