"""What can be wrong with a checkpoint, one class for each kind of fault."""

import pickle
from typing import Any

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "UnsafeCheckpointError",
    "IncompatibleCheckpointError",
    "NewerCheckpointError",
    "UnfittingOptimizerError",
    "UnfittingWeightsError",
    "StorageError",
    "NoCheckpointError",
    "CheckpointConflictError",
    "shown",
]


# What a file holds goes into messages, and they go into logs.
_MAX_MESSAGE_CHARS = 10_000


class CheckpointError(Exception):
    """A checkpoint could not be saved or loaded. All other errors of this package are kinds of it."""

    def __str__(self) -> str:
        # A KeyError would show a message as a key, in quotes.
        message = Exception.__str__(self) if isinstance(self, KeyError) else super().__str__()
        if len(message) <= _MAX_MESSAGE_CHARS:
            return message
        half = _MAX_MESSAGE_CHARS // 2
        return f"{message[:half]} [... {len(message) - 2 * half} characters ...] {message[-half:]}"


class CorruptCheckpointError(CheckpointError):
    """The bytes are not those that were written: cut short, changed, or never a checkpoint."""


class UnsafeCheckpointError(CheckpointError, pickle.UnpicklingError):
    """The file asks for something that a checkpoint must not do; nothing of it was run."""


class IncompatibleCheckpointError(CheckpointError):
    """The checkpoint is whole, but of a newer format or of another model."""


class NewerCheckpointError(IncompatibleCheckpointError):
    """The checkpoint is of a newer format than this release reads."""


class UnfittingWeightsError(IncompatibleCheckpointError, RuntimeError):
    """The weights are not those of the model, as far as it says so before any is changed."""


class UnfittingOptimizerError(IncompatibleCheckpointError, KeyError):
    """The optimizer's state is of other parameters than are optimized now; nothing was changed."""


class StorageError(CheckpointError, OSError):
    """A disk or a remote store failed."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was looked for."""


class CheckpointConflictError(CheckpointError, FileExistsError):
    """Something that must not be overwritten is in the way."""


_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_ITEMS = 8
_MAX_SHOWN_BITS = 1 << 10  # Python refuses to write out numbers of more than 4300 digits


def shown(value: Any) -> str:
    """Return how a message shows what a pickle made, without following it: it may unfold to far more than the pickle.

    Example:
        >>> shown(("storage", 3, [[]]))
        "('storage', 3, a list)"
    """
    if type(value) is not tuple:
        return _shown_item(value)
    more = ", ..." if len(value) > _MAX_SHOWN_ITEMS else "," if len(value) == 1 else ""
    return f"({', '.join(map(_shown_item, value[:_MAX_SHOWN_ITEMS]))}{more})"


def _shown_item(value: Any) -> str:
    if type(value) in (str, bytes):
        return repr(value[:_MAX_SHOWN_CHARS])
    if type(value) is int and value.bit_length() > _MAX_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return repr(value) if value is None or type(value) in (bool, int, float) else f"a {type(value).__name__}"
