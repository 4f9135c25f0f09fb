"""File and run names with placeholders for values of a run."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection
from difflib import get_close_matches
from string import Formatter
from typing import TYPE_CHECKING, Any, Final

from composer_events.parallelism import get_global_rank, get_world_size

if TYPE_CHECKING:
    from composer_time import Timestamp

__all__ = [
    "OF_RUN",
    "OF_TIME",
    "check_placeholders",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "partial_format",
]

_MAX_FIELDS: Final = 10_000

# By placeholder: the value in a single process, and the variables that common launchers set, the standard one first
# (torchrun sets GROUP_RANK instead of NODE_RANK).
_LOCAL_VARIABLES: Final = {
    "local_rank": (0, ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")),
    "local_world_size": (1, ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")),
    "node_rank": (0, ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")),
}

_COUNTERS: Final = ("epoch", "batch", "batch_in_epoch", "sample", "sample_in_epoch", "token", "token_in_epoch")
_CLOCKS: Final = ("total_wct", "epoch_wct", "batch_wct")

OF_RUN: Final = frozenset({"run_name", "rank", "world_size", *_LOCAL_VARIABLES})
"""The placeholders of `format_name_with_dist`."""
OF_TIME: Final = OF_RUN | {*_COUNTERS, *_CLOCKS}
"""The placeholders of `format_name_with_dist_and_time`."""


def partial_format(template: str, *args: Any, **kwargs: Any) -> str:
    """Fill in the known placeholders and keep the others.

    Otherwise it works like `str.format`: `{}`, `{0}`, `{name}`, attributes, indices, conversions and format
    specifications are supported, and doubled braces give one brace. A placeholder whose value does not support its
    specification, such as text for `{epoch:04d}`, is kept too.

    Args:
        template: The text with placeholders.
        *args: Values of the positional placeholders.
        **kwargs: Values of the named placeholders.

    Raises:
        ValueError: If `template` has unbalanced braces.
        RuntimeError: If `template` has more than 10000 placeholders.

    Example:
        >>> partial_format("{run}/ep{epoch:04d}-{}.pt", "last", epoch=7)
        '{run}/ep0007-last.pt'
    """
    formatter, parts, position = Formatter(), list[str](), 0
    for count, (literal, name, spec, conversion) in enumerate(formatter.parse(template)):
        if count >= _MAX_FIELDS:
            raise RuntimeError(
                f"The template {template[:40]!r}... has more than {_MAX_FIELDS} placeholders, so it was probably "
                f"built by accident. Shorten it."
            )
        parts.append(literal)
        if name is None:
            continue
        # `{}`, `{.attribute}` and `{[index]}` each consume the next positional value.
        numbered = f"{position}{name}" if name == "" or name[0] in ".[" else name
        position += numbered is not name
        try:
            # The steps of `str.format` one by one, because it raises for a missing placeholder instead of keeping it.
            value, _ = formatter.get_field(numbered, args, kwargs)
            value = formatter.convert_field(value, conversion or "") if conversion else value
            parts.append(format(value, partial_format(spec or "", *args, **kwargs)))
        except (KeyError, IndexError, TypeError, ValueError):
            parts.append(f"{{{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}")
    return "".join(parts)


def format_name_with_dist(format_str: str, run_name: str, **extra_format_kwargs: Any) -> str:
    """Fill in the run's name and the ranks of this process.

    Args:
        format_str: May use `{run_name}`, `{rank}`, `{local_rank}`, `{world_size}`, `{local_world_size}` and
            `{node_rank}`. The placeholder of a number that the launcher does not provide is kept.
        run_name: Name of the run.
        **extra_format_kwargs: Further values by name.

    Example:
        >>> format_name_with_dist("{run_name}/{name}-of-{batch}", "plum", name="loss")
        'plum/loss-of-{batch}'
    """
    return partial_format(format_str, run_name=run_name, **_rank_variables(), **extra_format_kwargs)


def format_name_with_dist_and_time(
    format_str: str, run_name: str, timestamp: Timestamp, **extra_format_kwargs: Any
) -> str:
    """Fill in the run's name, the ranks of this process, and the time in training.

    Args:
        format_str: May use the placeholders of `format_name_with_dist`, the counters `{epoch}`, `{batch}`,
            `{batch_in_epoch}`, `{sample}`, `{sample_in_epoch}`, `{token}`, `{token_in_epoch}`, and the seconds
            `{total_wct}`, `{epoch_wct}`, `{batch_wct}`.
        run_name: Name of the run.
        timestamp: The time in training.
        **extra_format_kwargs: Further values by name.

    Example:
        >>> from composer_time import Timestamp
        >>> format_name_with_dist_and_time("{run_name}-ba{batch}.pt", "plum", Timestamp(batch=12))
        'plum-ba12.pt'
    """
    times: dict[str, int | float] = {name: int(getattr(timestamp, name)) for name in _COUNTERS}
    times.update({name: getattr(timestamp, name).total_seconds() for name in _CLOCKS})
    return format_name_with_dist(format_str, run_name, **times, **extra_format_kwargs)


def check_placeholders(known: Collection[str] = OF_RUN, **templates: str | os.PathLike[str] | None) -> None:
    """Warn about placeholders in names of files and folders that will not be filled in.

    Example:
        >>> check_placeholders(folder="runs/{run_name}", filename=None)
    """
    for argument, template in templates.items():
        if template is None:
            continue
        try:
            names = [name for _, name, _, _ in Formatter().parse(str(template)) if name is not None]
        except ValueError as error:
            raise ValueError(
                f"{argument}={template!r} is malformed: {error}. Close each brace, and double those that belong to the "
                f"name itself."
            ) from error
        for name in names:
            # The name without its attributes and indices, which may be anything.
            root = re.split(r"[.\[]", name, maxsplit=1)[0]
            if root in known:
                continue
            close = get_close_matches(root, known, 1)
            advice = f"Did you mean {{{close[0]}}}?" if close else f"There are {', '.join(sorted(known))}."
            warnings.warn(
                f"{argument}={template!r} has the placeholder {{{name}}}, which will not be filled in and stays in the "
                f"name. {advice}",
                UserWarning,
                stacklevel=3,
            )


def _rank_variables() -> dict[str, int]:
    """Return the ranks and sizes of this process, without those that the launcher does not provide."""
    rank, world_size = get_global_rank(), get_world_size()
    known = {"rank": rank, "world_size": world_size}
    for name, (alone, variables) in _LOCAL_VARIABLES.items():
        told = next((value for value in map(os.environ.get, variables) if value and value.isdecimal()), None)
        if told is not None:
            known[name] = int(told)
        # With several ranks a missing number is unknown, not the default, so its placeholder is kept.
        elif world_size == 1:
            known[name] = alone
    if "node_rank" not in known and "local_world_size" in known:
        # Launchers number the ranks machine by machine.
        known["node_rank"] = rank // known["local_world_size"]
    return known
