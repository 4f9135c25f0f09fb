"""Arguments of the Trainer that older releases had: what each is called now, and what it means."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer.trainer._caller import level_of_user
from composer.trainer._keywords import say_unknown

if TYPE_CHECKING:
    from composer.trainer._given import Given

__all__ = ["WITHOUT_NEWER_NAME", "translate"]

WITHOUT_NEWER_NAME: dict[str, Any] = {
    "save_artifact_name": None,
    "save_latest_artifact_name": None,
    "compute_training_metrics": True,
    "fsdp_config": None,
    "fsdp_auto_wrap": None,
    "load_fsdp_monolith_rank0_only": None,
}
"""What is known by its older name alone, and what it is where nobody gives it."""

_INTERVALS = {"epoch": "1ep", "batch": "1ba"}


@dataclass(frozen=True, slots=True)
class _Older:
    """One older name.

    Attributes:
        instead: What to write today.
        apply: Writes a value onto the arguments.
        newer: The argument that it became, which must not be given too.
    """

    instead: str
    apply: Callable[[Given, Any], None]
    newer: str | None = None


def translate(given: Given, older: Mapping[str, Any]) -> None:
    """Write arguments with older names onto those of today.

    Raises:
        TypeError: If a name never was one of an argument.
        ValueError: If an argument is given under both names, or its value is not one that it could have.
    """
    for name in older:
        if name not in _OLDER:
            raise TypeError(say_unknown("__init__", name, [*(known for known, _ in given.items()), *_OLDER]))
    for name, value in older.items():
        known = _OLDER[name]
        if known.newer is not None and not given.is_default(known.newer):
            raise ValueError(
                f"{name}={value!r} and {known.newer}={getattr(given, known.newer)!r} are two names of one argument. "
                f"Give {known.newer} alone."
            )
        warnings.warn(
            f"{name}={value!r} is an older spelling. {known.instead}", DeprecationWarning, stacklevel=level_of_user()
        )
        known.apply(given, value)


def _keep(name: str, instead: str) -> _Older:
    return _Older(instead, lambda given, value: setattr(given, name, value))


def _clip_gradients(given: Given, threshold: Any) -> None:
    from composer_algorithms.gradient_clipping import GradientClipping  # here, since few scripts are that old

    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise ValueError(f"grad_clip_norm={threshold!r} must be a number; the norm of a gradient is clipped to it.")
    if threshold <= 0:
        return  # what -1 meant, the default of that time
    algorithms = given.algorithms
    several = [] if algorithms is None else list(algorithms) if isinstance(algorithms, (list, tuple)) else [algorithms]
    if any(isinstance(algorithm, GradientClipping) for algorithm in several):
        raise ValueError(
            f"grad_clip_norm={threshold!r} and algorithms={several!r} both clip gradients. Give the GradientClipping "
            "alone."
        )
    given.algorithms = [*several, GradientClipping("norm", threshold)]


def _choose_console_interval(given: Given, level: Any) -> None:
    name = str(getattr(level, "value", level)).lower()
    if name not in _INTERVALS:
        raise ValueError(f"console_log_level={level!r} must be 'epoch' or 'batch'.")
    given.console_log_interval = _INTERVALS[name]


def _set_load_strict(given: Given, value: Any) -> None:
    given.load_strict_model_weights = bool(value)


_OLDER: dict[str, _Older] = {
    "load_strict": _Older("Write load_strict_model_weights=....", _set_load_strict, "load_strict_model_weights"),
    "load_chunk_size": _Older("Leave it out: downloads choose the size themselves.", lambda given, value: None),
    "save_artifact_name": _keep(
        "save_artifact_name",
        "Give save_folder an address, or the list of callbacks a CheckpointSaver(remote_file_name=...).",
    ),
    "save_latest_artifact_name": _keep(
        "save_latest_artifact_name",
        "Give save_folder an address, or the list of callbacks a CheckpointSaver(latest_remote_file_name=...).",
    ),
    "grad_clip_norm": _Older("Write algorithms=GradientClipping('norm', ...).", _clip_gradients),
    "compute_training_metrics": _keep(
        "compute_training_metrics", "Let the model's get_metrics(is_train=True) return {} where they are not wanted."
    ),
    "fsdp_config": _keep("fsdp_config", "Write parallelism_config={'fsdp': ...}."),
    "fsdp_auto_wrap": _keep("fsdp_auto_wrap", "Write parallelism_config={'fsdp': {'auto_wrap': ...}}."),
    "load_fsdp_monolith_rank0_only": _keep(
        "load_fsdp_monolith_rank0_only", "Write parallelism_config={'fsdp': {'load_monolith_rank0_only': ...}}."
    ),
    "console_log_level": _Older(
        "Write console_log_interval='1ep' or '1ba'.", _choose_console_interval, "console_log_interval"
    ),
}
