"""Keywords that a method of the Trainer does not have: the error says what was probably meant."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

__all__ = ["naming_unknown", "say_unknown"]

TParameters = ParamSpec("TParameters")
TResult = TypeVar("TResult")


def naming_unknown(**meant: str) -> Callable[[Callable[TParameters, TResult]], Callable[TParameters, TResult]]:
    """Make a method say what was meant by a keyword that it does not have.

    Args:
        meant: By keyword, what to write instead, where names that look alike do not say it.
    """

    def decorate(method: Callable[TParameters, TResult]) -> Callable[TParameters, TResult]:
        names = [name for name in inspect.signature(method).parameters if name != "self"]

        @functools.wraps(method)
        def checked(*args: TParameters.args, **kwargs: TParameters.kwargs) -> TResult:
            for name in kwargs:
                if name not in names:
                    raise TypeError(say_unknown(method.__name__, name, names, meant.get(name)))
            return method(*args, **kwargs)

        return checked

    return decorate


def say_unknown(method: str, name: str, names: Iterable[str], instead: str | None = None) -> str:
    """Return the error about a keyword that is none, with those that look like it.

    Args:
        method: Of the Trainer.
        name: What was typed.
        names: The keywords there are.
        instead: What to write, if it is known better.
    """
    if instead is None:
        near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
        where = "Trainer" if method == "__init__" else f"Trainer.{method}"
        instead = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"See the docstring of {where} for all."
    return f"Trainer.{method}() got an unexpected keyword argument {name!r}. {instead}"
