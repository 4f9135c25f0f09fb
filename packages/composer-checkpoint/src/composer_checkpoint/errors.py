"""What can be wrong with a checkpoint, one class for each kind of fault."""

import pickle

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
