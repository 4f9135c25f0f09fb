"""Modules whose names are imported on first use."""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from opcode import opmap
from types import FrameType, ModuleType
from typing import Final

from composer._former_modules import GONE

_IMPORT_FROM: Final = opmap["IMPORT_FROM"]


def lazy_face(
    face: str,
    homes: Mapping[str, Iterable[str]],
    *,
    submodules: Iterable[str] = (),
    renamed: Mapping[str, str] | None = None,
    removed: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a module whose names are defined elsewhere (PEP 562).

    A name is looked up on first use and then stored in the module, so that later uses are as fast as any attribute.

    Args:
        face: The module's own `__name__`.
        homes: Names by the module that defines them.
        submodules: Submodules that are available without a separate import, as in
            `import composer; composer.utils.dist.get_world_size()`.
        renamed: New names with their modules, such as `'composer.loss.DiceLoss'`, by old names. An old name warns.
        removed: Sentences about the replacement, or keys of `GONE`, by removed names. `from face import name` raises
            `ImportError`, because Python discards the message of an `AttributeError` there; any other access raises
            `AttributeError`. Names that are keys of `GONE` need not be listed.

    Returns:
        The two functions, in this order.
    """
    home = {name: owner for owner, names in homes.items() for name in names}
    modules = frozenset(submodules)
    new_names = renamed or {}
    hints = removed or {}

    def __getattr__(name: str) -> object:
        if name in modules:
            return import_module(f"{face}.{name}")  # the import also sets the attribute
        if name in home:
            value = getattr(import_module(home[name]), name)
        elif name in new_names:
            owner, _, new_name = new_names[name].rpartition(".")
            value = getattr(import_module(owner), new_name)
            message = f"{face}.{name} is now called {new_names[name]}; the old name goes away in 1.0."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        elif hint := hints.get(name) or GONE.get(f"{face}.{name}"):
            message = f"{face}.{name} is gone: {GONE.get(hint, hint)}"
            raise ImportError(message, name=face) if _is_imported(sys._getframe(1)) else AttributeError(message)
        else:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        setattr(sys.modules[face], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted(_own_names(sys.modules[face]).keys() | home.keys() | modules)

    class Face(type(sys.modules[face])):
        @property
        def __dict__(self) -> dict[str, object]:  # pyright: ignore[reportIncompatibleVariableOverride]
            """Load all names, since scripts search `vars(composer.callbacks)` for classes."""
            # importlib also reads `__dict__`, for example in a reload, and must not load anything.
            by_import = sys._getframe(1).f_globals["__name__"].startswith("importlib.")
            for name in () if by_import else (*home, *modules):
                with suppress(ImportError):  # an optional library may be missing
                    getattr(self, name)
            return _own_names(self)

    # A module-level `__getattr__` cannot intercept `__dict__`; the class of a module can.
    sys.modules[face].__class__ = Face
    return __getattr__, __dir__


def _own_names(module: ModuleType) -> dict[str, object]:
    # Through the descriptor, since `module.__dict__` is the property above, which loads all names.
    return vars(ModuleType)["__dict__"].__get__(module)


def replace_module(alias: str, target: str) -> None:
    """Replace the module that is being imported as `alias` by the module `target`.

    For modules that users patch, so that a patch of either module affects both. The import system returns the entry in
    `sys.modules` after the module's code has run.
    """
    sys.modules[alias] = import_module(target)


def share_patches(face: str, owner: str, names: Iterable[str]) -> None:
    """Forward assignments to some names of a module to the module that uses them.

    For names that users patch in a module with other names, which `replace_module` cannot replace as a whole.
    """
    target, shared = import_module(owner), frozenset(names)

    class PatchedFace(type(sys.modules[face])):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name in shared:
                setattr(target, name, value)

    sys.modules[face].__class__ = PatchedFace


def _is_imported(asker: FrameType | None) -> bool:
    """Return whether a name is accessed by `from module import name`, not as an attribute or by `hasattr`."""
    while asker is not None and asker.f_code.co_name == "__getattr__":  # of a face that forwards to another face
        asker = asker.f_back
    if asker is None:
        return False
    # For `from package import name`, importlib first checks whether a submodule must be imported.
    by_package = asker.f_globals.get("__name__") == "importlib._bootstrap"
    return by_package or asker.f_code.co_code[asker.f_lasti] == _IMPORT_FROM
