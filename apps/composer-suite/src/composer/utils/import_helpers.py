"""Importing by name, and the error for an optional dependency that is missing."""

from importlib import import_module
from typing import Any

from composer_models import MissingConditionalImportError

__all__ = ["MissingConditionalImportError", "import_object"]


def import_object(name: str) -> Any:
    """Import what a name such as `'package.module:attribute'` stands for.

    Importing runs the module's code: never pass a name that came out of a checkpoint or from a stranger.

    Args:
        name: The module and the attribute, with a colon between them. Dots lead into the attribute's own attributes.

    Raises:
        ValueError: If the name is not of that form.
        ImportError: If the module does not exist.
        AttributeError: If the module has no such attribute.

    Example:
        >>> import_object("collections:OrderedDict.fromkeys")("ab")
        OrderedDict([('a', None), ('b', None)])
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError(
            f"name={name!r} does not say what to import: it needs a module and an attribute with a colon between them, "
            f"such as 'collections:OrderedDict'."
        )
    found: Any = import_module(module)
    for attribute in path.split("."):
        found = getattr(found, attribute)
    return found
