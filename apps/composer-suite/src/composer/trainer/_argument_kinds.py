"""Of which kind each argument must be, where a wrong one would be taken for something else and not noticed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from types import SimpleNamespace
from typing import Any

__all__ = ["check_kinds", "is_whole", "refuse_twice", "to_plain"]

# A text such as 'no' would count as yes.
_FLAGS = (
    "spin_dataloaders",
    "step_schedulers_every_batch",
    "progress_bar",
    "log_to_console",
    "log_traces",
    "auto_log_hparams",
    "load_weights_only",
    "load_strict_model_weights",
    "load_progress_bar",
    "load_trusted",
    "load_restart_epoch",
    "save_overwrite",
    "save_weights_only",
    "save_metrics",
    "save_async",
    "autoresume",
    "accumulate_train_batch_on_tokens",
    "deterministic_mode",
    "reset_time",
)
_PATHS = ("save_folder", "save_filename", "save_latest_filename", "load_path")


def check_kinds(arguments: SimpleNamespace) -> None:
    """Check flags, labels and lists of names of the constructor or of `fit`, as far as these are there.

    Raises:
        TypeError: If one is of another kind.
    """
    given = vars(arguments)
    for name in _FLAGS:
        value = given.get(name)
        if value is not None and not (isinstance(value, Integral) and value in (0, 1)):
            raise TypeError(f"{name}={value!r} must be True or False.")
    label = given.get("train_dataloader_label", "train")
    if not isinstance(label, str):
        raise TypeError(f"train_dataloader_label={label!r} must be a text, such as 'train'; progress bars show it.")
    config = given.get("precision_config")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"precision_config={config!r} must be a dict of settings of an 8-bit precision, or None.")
    _check_places(given)
    names = given.get("load_exclude_algorithms")
    if names is not None and not _is_list_of_names(names):
        raise TypeError(
            f"load_exclude_algorithms={names!r} must be a list of class names of algorithms, such as ['BlurPool']."
        )


def _check_places(given: Mapping[str, Any]) -> None:
    for name in _PATHS:
        value = given.get(name)
        is_left_out = value is None and (name != "save_filename" or name not in given)
        if not is_left_out and not isinstance(value, str | os.PathLike):
            raise TypeError(
                f"{name}={value!r} must be a text or a path{'' if name == 'save_filename' else ', or None'}."
            )


def _is_list_of_names(names: Any) -> bool:
    is_many = isinstance(names, Iterable) and not isinstance(names, (str, bytes))
    return is_many and all(isinstance(name, str) for name in names)


def refuse_twice(**members: Iterable[object]) -> None:
    """Refuse to call one object twice at each event.

    Args:
        members: What listens, by the name of the argument that holds it.

    Raises:
        ValueError: If one of them is there twice, in one argument or in two.
    """
    seen: dict[int, str] = {}
    for name, several in members.items():
        for member in several:
            before = seen.setdefault(id(member), name)
            if before is not name or sum(other is member for other in several) > 1:
                where = f"twice in {name}" if before is name else f"in {before} and in {name}"
                raise ValueError(
                    f"The same {type(member).__name__} is {where}, so it would be called twice at each event: "
                    f"{member!r}. Leave it out once, or make a second one."
                )


def is_whole(value: object) -> bool:
    """Say whether a value is a whole number, which truth values are not here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def to_plain(value: Any) -> Any:
    """Return a number of NumPy's as Python's, and anything else as it is."""
    is_numpys = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_numpys else value
