"""Call an algorithm or a callback so that an exception says whose it is."""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer_events.event import Event
    from composer_events.logger import Logger
    from composer_events.state import State


def call_hook(kind: str, hook: object, method: str, event: Event, state: State, logger: Logger) -> Any:
    """Call a method of an algorithm or a callback, the hook, and return what it returns."""
    try:
        found = getattr(hook, method, None)
        if found is None or isinstance(hook, type):
            found = method_of(kind, hook, method)
        return found(event, state, logger)
    except Exception as error:
        blame(error, kind, hook, event, state)
        raise


def method_of(kind: str, hook: object, method: str) -> Callable[..., Any]:
    """Return the method by which an algorithm or a callback is called.

    Raises:
        TypeError: If the hook is a class, or has no such method.
    """
    found = getattr(hook, method, None)
    if found is not None and not isinstance(hook, type):
        return found
    hint = f"an object of a class that derives from {kind.capitalize()}"
    if isinstance(hook, type):
        hint = f"an object of that class: {hook.__name__}(...)"
    raise TypeError(f"state.{kind}s holds {hook!r}, which is no {kind} and has no {method}() to call. Put in {hint}.")


def blame(error: Exception, kind: str, hook: object, event: Event, state: State) -> None:
    """Add to an exception, whose type stays what it is, which hook or pass raised it and when."""
    when = ""
    with suppress(Exception):  # a state without a proper timestamp must not hide what went wrong
        when = f" (epoch {int(state.timestamp.epoch)}, batch {int(state.timestamp.batch)})"
    name = hook.__name__ if isinstance(hook, FunctionType) else type(hook).__name__
    error.add_note(f"raised by {kind} {name} on {event}{when}")
