"""Values of a sweep on the command line: lists such as `lr=1e-3,3e-3`, and ranges such as `seed=1..5`."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_LIKE_RANGE = re.compile(rf"{_NUMBER}\.\..*|\.\.{_NUMBER}")
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_NAMED = re.compile("run_name=")
_MAX_NAME_BYTES = 200  # of the 255 of a file name, which may get numbers and an ending


def is_named(changes: Sequence[str]) -> bool:
    """Return whether the arguments of a run give its name."""
    return any(map(_NAMED.match, changes))


def named_runs(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of each run by a name, which is at most 200 bytes long.

    Raises:
        ValueError: If an argument is not valid.
    """
    names: Counter[str] = Counter()
    runs: dict[str, list[str]] = {}
    for changes in dict.fromkeys(product(*map(_choices, arguments))):
        chosen = "-".join(each for each in changes if each not in arguments)
        name = re.sub(r"[^\w.=-]+", "_", chosen) or "run"
        if len(name.encode()) > _MAX_NAME_BYTES:
            digest = hashlib.sha256(chosen.encode()).hexdigest()[:12]
            name = f"{name.encode()[: _MAX_NAME_BYTES - 13].decode(errors='ignore')}-{digest}"
        names[name] += 1
        name += f"-{names[name]}" if names[name] > 1 else ""
        runs[name] = list(changes)
    return runs


def _choices(argument: str) -> list[str]:
    key, values = split_values(argument)
    if values is None:
        return [argument]
    if isinstance(values, Range):
        if not (isinstance(values.first, int) and isinstance(values.last, int)):
            raise ValueError(f"{argument!r} must be whole numbers, or values such as {key}=0.1,0.2, without --optuna.")
        values = _whole_numbers(values.first, values.last)
    return [f"{key}={value}" for value in values]


@dataclass(frozen=True)
class Range:
    """The numbers from one to another; `is_log` if they are written as `1e-4`."""

    first: float
    last: float
    is_log: bool


def split_values(argument: str) -> tuple[str, list[str] | Range | None]:
    """Return the key of an argument and its values, which are `None` for an option.

    Raises:
        ValueError: If one of several values is empty, a quotation mark is not closed, or a range is not valid.
    """
    key, separator, text = argument.partition("=")
    if not separator or key.startswith("-"):
        return key, None
    parts = [part.strip() for part in _split(argument, text)]
    if len(parts) > 1 and "" in parts:
        raise ValueError(f"{argument!r} must have a value on each side of a comma. For empty text, write ''.")
    if len(parts) == 1 and (found := _RANGE.fullmatch(parts[0])):
        first, last = map(_number, found.groups())
        return key, Range(first, last, is_log="e" in text.lower() and first > 0 and last > 0)
    return key, [value for part in parts for value in _values(argument, part)]


def _values(argument: str, part: str) -> list[str]:
    """Return what one part of a list stands for: the whole numbers of a range, or itself."""
    if found := _RANGE.fullmatch(part):
        first, last = map(_number, found.groups())
        if isinstance(first, int) and isinstance(last, int):
            return _whole_numbers(first, last)
    if _LIKE_RANGE.fullmatch(part):
        raise ValueError(
            f"{part!r} in {argument!r} must be a range of whole numbers, such as 1..5; for text, put it in quotation "
            f"marks, as in \"{argument.partition('=')[0]}='{part}'\"."
        )
    return [part]


def _number(text: str) -> float:
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def _whole_numbers(first: int, last: int) -> list[str]:
    step = 1 if first <= last else -1
    return [str(number) for number in range(first, last + step, step)]


def _split(argument: str, text: str) -> list[str]:
    """Split at the commas that are in no brackets or quotation marks, which count where a value begins, as in YAML."""
    parts, depth, position = [""], 0, 0
    while position < len(text):
        letter = text[position]
        before = parts[-1].rstrip()
        if letter in "'\"" and (not before or (depth and before[-1] in "[{,:")):
            quoted = _QUOTED.match(text, position)
            if quoted is None:
                raise ValueError(f"{argument!r} has a quotation mark {letter} that must be closed; it opens a value.")
            parts[-1] += quoted[0]
            position = quoted.end()
            continue
        depth = max(0, depth + (letter in "[{(") - (letter in "]})"))
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
        position += 1
    return parts
