"""Values of a sweep on the command line: lists such as `lr=1e-3,3e-3`, and ranges such as `seed=1..5`."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_NAMED = re.compile("run_name=")


def is_named(changes: Sequence[str]) -> bool:
    """Return whether the arguments of a run give its name."""
    return any(map(_NAMED.match, changes))


def named_runs(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of each run by a name.

    Raises:
        ValueError: If several runs are given one name.
    """
    names: Counter[str] = Counter()
    runs: dict[str, list[str]] = {}
    for changes in dict.fromkeys(product(*map(_choices, arguments))):
        name = re.sub(r"[^\w.=-]+", "_", "-".join(each for each in changes if each not in arguments)) or "run"
        names[name] += 1
        name += f"-{names[name]}" if names[name] > 1 else ""
        runs[name] = list(changes)
    if len(runs) > 1 and any(map(_NAMED.match, arguments)) and not any("run_name=" in name for name in runs):
        raise ValueError("run_name= cannot be combined with several runs, which need different names. Leave it out.")
    return runs


def _choices(argument: str) -> list[str]:
    key, values = split_values(argument)
    if values is None:
        return [argument]
    if isinstance(values, list):
        return [f"{key}={value}" for value in values]
    first, last = values.first, values.last
    if not (isinstance(first, int) and isinstance(last, int)):
        raise ValueError(f"{argument!r} must be whole numbers, or values such as {key}=0.1,0.2, without --optuna.")
    step = 1 if first <= last else -1
    return [f"{key}={number}" for number in range(first, last + step, step)]


@dataclass(frozen=True)
class Range:
    """The numbers from one to another; `is_log` if they are written as `1e-4`."""

    first: float
    last: float
    is_log: bool


def split_values(argument: str) -> tuple[str, list[str] | Range | None]:
    """Return the key of an argument and its values, which are `None` for an option."""
    key, separator, text = argument.partition("=")
    if not separator or key.startswith("-"):
        return key, None
    if found := _RANGE.fullmatch(text):
        first, last = (int(end) if end.lstrip("+-").isdecimal() else float(end) for end in found.groups())
        return key, Range(first, last, is_log="e" in text.lower() and first > 0 and last > 0)
    return key, [value.strip() for value in _split(text)]


def _split(text: str) -> list[str]:
    """Split at the commas that are in no brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
