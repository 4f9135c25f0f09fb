"""Time in training: lengths, their units, and the clock that a training loop advances.

`Time` is a length (`'10ep'`, `'500ba'`, `'1h30m'`), `TimeUnit` its unit, and `Timestamp` the progress of a run.
`ensure_time` converts user input to a `Time`. `StringEnum` and `Serializable` are two small base classes that the
packages above share. Only the standard library is imported.
"""

from __future__ import annotations

from composer_time.serializable import Serializable
from composer_time.string_enum import StringEnum
from composer_time.time import Time, TimeUnit, ensure_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from composer_time.timestamp import Timestamp

__all__ = [
    "Time",
    "TimeUnit",
    "Timestamp",
    "ensure_time",
    "StringEnum",
    "Serializable",
    "__version__",
]

__version__: str


def __getattr__(name: str) -> object:
    """Import on first use the names that are slow to import: `Timestamp` needs datetime, the version metadata."""
    if name == "Timestamp":
        from composer_time.timestamp import Timestamp as value
    elif name == "__version__":
        from importlib.metadata import version

        value = version("composer-time")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # found directly from now on, without this function
    return value
