"""A check of one's own for every file of a checkpoint, named by an environment variable."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["VALIDATION_VARIABLE", "Specs", "chosen_validation", "validate_file"]

VALIDATION_VARIABLE = "CHECKPOINT_VALIDATION_FUNCTION"

Specs = Sequence[tuple[int, int]]
"""The stretches of a file that are going to be read: where each one starts, and its length in bytes."""


def chosen_validation() -> Callable[[str, Specs | None], Any] | None:
    """Return the function that `CHECKPOINT_VALIDATION_FUNCTION='package.module.function'` names, if it is set.

    The module is imported, so whoever sets the variable decides what code runs.

    Raises:
        ModuleNotFoundError: If there is no such module.
        AttributeError: If the module has no such function.
        ValueError: If the variable is no dotted name.
    """
    name = os.environ.get(VALIDATION_VARIABLE)
    if not name:
        return None
    module, _, function = name.rpartition(".")
    if not module:
        raise ValueError(
            f"{VALIDATION_VARIABLE}={name!r} is no dotted name. Set it to one such as 'package.module.function', or "
            f"unset it."
        )
    return getattr(import_module(module), function)


def validate_file(
    path: str | os.PathLike[str],
    specs: Specs | None = None,
    validate: Callable[[str, Specs | None], Any] | None = None,
) -> None:
    """Ask the user's function whether a file may be read, before any of it is.

    Args:
        path: The file.
        specs: The stretches that will be read; all of it when `None`.
        validate: The function; the one of the environment, if there is one, when `None`.

    Raises:
        ValueError: If it answers with anything that is false.
    """
    validate = validate or chosen_validation()
    if validate is not None and not validate(os.fspath(path), specs):
        raise ValueError(
            f"{os.fspath(path)} is refused by {getattr(validate, '__qualname__', validate)} of "
            f"{VALIDATION_VARIABLE}={os.environ.get(VALIDATION_VARIABLE)!r}. Load another checkpoint."
        )
