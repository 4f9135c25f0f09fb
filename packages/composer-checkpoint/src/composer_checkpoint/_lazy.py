"""Packages whose names are imported on first use."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module


def lazy_face(face: str, homes: Mapping[str, Iterable[str]]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of the module `face`, given its names by the modules that define them."""
    home = {name: owner for owner, names in homes.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[face], name, value)  # so that later accesses do not call this function
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[face]), *home})

    return __getattr__, __dir__
