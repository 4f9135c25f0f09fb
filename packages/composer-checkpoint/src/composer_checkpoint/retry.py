"""Trying again what may work the next time."""

import functools
import inspect
import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

__all__ = ["retry"]

log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Errors = type[BaseException] | tuple[type[BaseException], ...]
_jitter = random.Random()  # its own, so that nobody's seed or sequence changes


@overload
def retry(
    exc_class: _Errors = Exception, num_attempts: int = 3, initial_backoff: float = 1.0, max_jitter: float = 0.5
) -> Callable[[_Function], _Function]: ...
@overload
def retry(exc_class: _Function, /) -> _Function: ...
def retry(
    exc_class: Any = Exception, num_attempts: int = 3, initial_backoff: float = 1.0, max_jitter: float = 0.5
) -> Any:
    """Decorate a function so that it is called again when it raises.

    Before attempt `i + 2` it sleeps `initial_backoff * 2**i` seconds and up to `max_jitter` more, so that many
    processes that failed together do not come back together. A function with a parameter `retry_index` gets the number
    of attempts before this one. Works with and without parentheses.

    Args:
        exc_class: The kind, or kinds, of exception to try again after. Others pass at once.
        num_attempts: How many calls at most. The last one's exception is raised.
        initial_backoff: Seconds.
        max_jitter: Seconds.

    Raises:
        ValueError: If `num_attempts` is less than 1, or a number of seconds is negative.

    Example:
        >>> attempts = []
        >>> @retry(ConnectionError, num_attempts=3, initial_backoff=0, max_jitter=0)
        ... def fetch(retry_index=0):
        ...     attempts.append(retry_index)
        ...     if retry_index < 2:
        ...         raise ConnectionError("reset")
        >>> fetch()
        >>> attempts
        [0, 1, 2]
    """
    if not isinstance(exc_class, (type, tuple)):
        return retry()(exc_class)
    errors: _Errors = exc_class
    if num_attempts < 1:
        raise ValueError(f"num_attempts={num_attempts!r} is no number of calls: it must be 1 or more.")
    for name, seconds in (("initial_backoff", initial_backoff), ("max_jitter", max_jitter)):
        if not seconds >= 0:
            raise ValueError(f"{name}={seconds!r} is no number of seconds: it must be 0 or more.")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        counts = "retry_index" in inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            index = 0
            while True:
                if counts:
                    kwargs["retry_index"] = index
                try:
                    return function(*args, **kwargs)
                except errors as error:
                    if index + 1 >= num_attempts:
                        raise
                    pause_s = initial_backoff * 2**index + _jitter.random() * max_jitter
                    log.info("%s; attempt %d of %d in %.1f s", error, index + 2, num_attempts, pause_s)
                    time.sleep(pause_s)
                index += 1

        return call

    return decorate
