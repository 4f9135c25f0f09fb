"""Redoing the model surgery that a checkpoint's weights depend on."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from composer_events._entry_points import algorithm_modules
from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = ["apply_required_algorithms", "parse_algorithm"]

# More than any algorithm says of itself, less than what would exhaust Python's parser.
_MAX_LENGTH = 10_000


def apply_required_algorithms(
    state: State,
    saved: Sequence[Sequence[Any]],
    logger: Any,
    exclude: Collection[str],
    passes: Sequence[Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]],
) -> None:
    """Add the algorithms without which the saved weights do not fit, and apply them to the model.

    Args:
        state: Gets the algorithms; the model is changed by them.
        saved: Pairs of class name and state, as in a checkpoint.
        logger: Passed to the algorithms.
        exclude: Class names to leave out.
        passes: The engine's passes, which order the algorithms.

    Raises:
        ValueError: If an algorithm fails, or would have had to be applied before one that has been applied already.
    """
    names = [name for name, _ in saved]
    if unknown := [name for name in exclude if name not in names]:
        _warn(
            f"load_exclude_algorithms names {', '.join(map(repr, unknown))}, which the checkpoint does not have. It "
            f"has {', '.join(map(repr, names)) or 'no algorithms'}."
        )
    missing = list(_missing_algorithms(state, saved, exclude))
    if not missing:
        return
    applied = [algorithm for algorithm in state.algorithms if algorithm.match(Event.INIT, state)]
    order: Sequence[Algorithm] = [*applied, *missing]
    for algorithm_pass in passes:
        order = algorithm_pass(order, Event.INIT)
    _refuse_wrong_order(order, applied, missing)
    for algorithm in order:
        if not any(algorithm is one for one in missing):
            continue
        state.algorithms.append(algorithm)
        _apply(algorithm, state, logger)


def parse_algorithm(text: str, algorithm_class: type[Algorithm]) -> Algorithm:
    """Build an algorithm from its repr, which comes from a file and is therefore parsed, never evaluated.

    Args:
        text: One call of the class, with literals, `Event.X`, `TimeUnit.X` and `Time(...)` as arguments.
        algorithm_class: The only class that is called.

    Raises:
        ValueError: If the text is anything else.
    """
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"The text has {len(text)} characters, more than the {_MAX_LENGTH} that are read.")
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a Python expression.") from error
    name = algorithm_class.__qualname__
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name):
        raise ValueError(f"{text!r} is not a call of {name}.")
    return algorithm_class(*map(_value, call.args), **_keywords(call))


def _missing_algorithms(state: State, saved: Sequence[Sequence[Any]], exclude: Collection[str]) -> Iterator[Algorithm]:
    for name, algorithm_state in saved:
        if name in exclude:
            continue
        text = str(algorithm_state.get("repr", ""))
        # By name: a class that was defined anew, as in a notebook, is another object than the one of an instance.
        present = [algorithm for algorithm in state.algorithms if type(algorithm).__qualname__ == name]
        if present:
            if present[0].required_on_load() and all(repr(algorithm) != text for algorithm in present):
                _warn(
                    f"required_on_load algorithm {name} was {text} when the checkpoint was written and is "
                    f"{present[0]!r} now. The present one is kept; the weights may not fit."
                )
            continue
        algorithm_class = _find_class(name)
        if algorithm_class is None or not algorithm_class.required_on_load():
            continue
        try:
            yield parse_algorithm(text, algorithm_class)
        except Exception as error:  # the constructor is called with what the file says and may refuse it in any way
            _warn(
                f"required_on_load algorithm {name} could not be rebuilt from {text[:200]!r} ({error}) and is left "
                f"out. If the weights do not fit, pass the algorithm to algorithms=."
            )


def _find_class(name: str) -> type[Algorithm] | None:
    # What the program has loaded itself comes first: it needs no import. Of several with one name the newest is meant,
    # but none that no weights depend on.
    loaded = [own for own in _subclasses(Algorithm) if own.__qualname__ == name and own.required_on_load()]
    if loaded:
        return loaded[-1]
    for module in algorithm_modules():
        if name in getattr(module, "__all__", ()):
            found: Any = getattr(module, name)
            if isinstance(found, type) and issubclass(found, Algorithm):
                return found
    return None


def _subclasses(algorithm_class: type[Algorithm]) -> Iterator[type[Algorithm]]:
    for subclass in algorithm_class.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _refuse_wrong_order(order: Sequence[Algorithm], applied: Sequence[Algorithm], missing: Sequence[Algorithm]) -> None:
    early: list[Algorithm] = []
    for algorithm in order:
        if any(algorithm is one for one in missing):
            early.append(algorithm)
        elif early and any(algorithm is one for one in applied):
            raise ValueError(
                f"The checkpoint needs {early}, which the engine applies before {algorithm!r}, and that has been "
                f"applied to the model already. Pass all of them to algorithms=, or leave the former out with "
                f"load_exclude_algorithms={[type(one).__qualname__ for one in early]}."
            )


def _apply(algorithm: Algorithm, state: State, logger: Any) -> None:
    name = type(algorithm).__qualname__
    try:
        if algorithm.match(Event.INIT, state):
            algorithm.apply(Event.INIT, state, logger)
    except Exception as error:
        raise ValueError(
            f"The checkpoint needs {algorithm!r}, which could not be applied to the model: {error}. Change the model "
            f"to what it was when the checkpoint was written, or leave the algorithm out with "
            f"load_exclude_algorithms=[{name!r}]."
        ) from error
    _warn(
        f"Automatically adding required_on_load algorithm {algorithm!r}, since the weights in the checkpoint depend "
        f"on it. Pass load_exclude_algorithms=[{name!r}] to leave it out."
    )


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="inf" | "nan" as name):
            return getattr(math, name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -math.inf
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Set(elts=items):
            return {_value(item) for item in items}
        case ast.Dict(keys=keys, values=values) if None not in keys:  # None stands for an unpacked mapping
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.Attribute(value=ast.Name(id="Event"), attr=name):
            return Event(name)
        case ast.Attribute(value=ast.Name(id="TimeUnit"), attr=name):
            return TimeUnit(name)
        case ast.Call(func=ast.Name(id="Time"), args=arguments):
            return Time(*map(_value, arguments), **_keywords(node))
        case _:
            return _refuse(node)


def _keywords(call: ast.Call) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            _refuse(call)
        keywords[keyword.arg] = _value(keyword.value)
    return keywords


def _refuse(node: ast.expr) -> NoReturn:
    raise ValueError(
        f"{ast.unparse(node)!r} is not a value that is read from a checkpoint: only literals, Event.X, TimeUnit.X and "
        f"Time(...) are."
    )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
