"""How a command ends: its exit code, and what it prints as text and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

__all__ = ["ExitCode", "MismatchError", "Result", "UsageError"]


class ExitCode(IntEnum):
    """What the command returns."""

    FINE = 0
    FAILURE = 1
    """A failure, a damaged checkpoint, or differences."""
    USAGE = 2
    MISMATCH = 3
    """What was written is not what was read."""
    UNSAFE = 4
    """The checkpoint asks for more than data."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a command found."""

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    code: int = ExitCode.FINE


class UsageError(ValueError):
    """The arguments do not fit each other or the checkpoint."""


class MismatchError(RuntimeError):
    """What was written is not what was read."""
