"""Enum whose members can be given as strings in any case."""

from __future__ import annotations

import warnings
from enum import Enum

__all__ = ["StringEnum"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class StringEnum(Enum):
    """Enum that accepts a member, its name or its value.

    Names are upper case and values lower case; a class body that breaks this raises `ValueError`. Calling the class
    with a string in any case returns the member with that name or value.

    Comparing a member with a string works and emits a `UserWarning`, because the string is usually one that should
    have been converted to a member.

    Raises:
        ValueError: If a string is neither a name nor a value.
        TypeError: If the class is called with anything but a member or a string.

    Example:
        >>> class Color(StringEnum):
        ...     CRIMSON = "red"
        >>> Color("Red") is Color("crimson") is Color(Color.CRIMSON) is Color.CRIMSON
        True
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in cls.__members__.items():
            value: object = member.value
            if name != name.upper():
                raise ValueError(
                    f"{cls.__name__}.{name}: the name {name!r} of a StringEnum member has to be upper case. "
                    f"Call it {name.upper()!r}."
                )
            if not isinstance(value, str) or value != value.lower():
                raise ValueError(
                    f"{cls.__name__}.{name}: the value {value!r} of a StringEnum member has to be a lower-case "
                    f"string. Write {str(value).lower()!r}."
                )
            if cls.__members__.get(value.upper(), member) is not member:
                raise ValueError(
                    f"{cls.__name__}.{name}: the value {value!r} is also the name of another member, so the string "
                    "would be ambiguous. Choose another value."
                )

    @classmethod
    def _missing_(cls, value: object) -> StringEnum:
        # Enum has already tried the exact value. Its two tables, by name and by value, are built once per class and
        # contain the aliases too.
        if not isinstance(value, str):
            raise TypeError(
                f"{value!r} is of type {type(value).__name__}, not a {cls.__name__}. Pass a member or, in any case, "
                f"one of {cls._spellings()}."
            )
        member = cls.__members__.get(value.upper()) or cls._value2member_map_.get(value.lower())
        if not isinstance(member, cls):
            raise ValueError(f"{value!r} is not a {cls.__name__}. Accepted, in any case: {cls._spellings()}.")
        return member

    @classmethod
    def _spellings(cls) -> str:
        """Return every string that names a member, in the order of definition."""
        spellings = (spelling for name, member in cls.__members__.items() for spelling in (member.value, name.lower()))
        return ", ".join(repr(spelling) for spelling in dict.fromkeys(spellings))

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self is other
        if not isinstance(other, str):
            return NotImplemented
        warnings.warn(
            f"Detected comparison between a string and {type(self).__name__}: {other!r} with {self}. Compare with a "
            f"member, or convert the string first: {type(self).__name__}({other!r}).",
            UserWarning,
            stacklevel=2,
        )
        try:
            return self is type(self)(other)
        except ValueError:
            return NotImplemented

    # Defining __eq__ removes the inherited __hash__, and Enum's is a Python function. Members are singletons and keys
    # of the tables that every event of a training step reads, so they hash by identity, in C.
    __hash__ = object.__hash__
