"""The arguments of a Trainer, by the names of today, whatever names they were typed under."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from composer.trainer._argument_kinds import to_plain
from composer.trainer._older_names import WITHOUT_NEWER_NAME, translate
from composer.trainer._refusals import share_refusal

__all__ = ["Given"]


class Given(SimpleNamespace):
    """What a user gave to the constructor: each argument is an attribute, as it was typed but for NumPy's numbers.

    Args:
        arguments: What `locals()` says at the constructor's first line. Those in `older_names` are translated, with a
            `DeprecationWarning` each.
        defaults: What the constructor takes where nothing is given.

    Raises:
        TypeError: If `older_names` holds a name that never was one.
        ValueError: If an argument is given under an older and under today's name.
        RankDisagreementError: If so, and other ranks do not find the same.
    """

    def __init__(self, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        own = {name: to_plain(value) for name, value in arguments.items() if name not in ("self", "older_names")}
        super().__init__(**own, **WITHOUT_NEWER_NAME)
        self._defaults = {**defaults, **WITHOUT_NEWER_NAME}
        try:
            translate(self, arguments["older_names"])
        except Exception as refusal:
            share_refusal(refusal, self)
            raise

    def items(self) -> Iterator[tuple[str, Any]]:
        """Return the arguments with their names."""
        return ((name, value) for name, value in vars(self).items() if not name.startswith("_"))

    def is_default(self, name: str) -> bool:
        """Say whether an argument is what it is where nobody gives it."""
        return name in self._defaults and _is_same(getattr(self, name), self._defaults[name])


def _is_same(value: Any, default: Any) -> bool:
    # All defaults are plain; what is not plain, such as an array, may not compare at all.
    return value is default or (
        type(value) is type(default) and isinstance(value, (int, float, str)) and value == default
    )
