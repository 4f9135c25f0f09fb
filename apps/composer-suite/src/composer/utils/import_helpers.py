"""Import of objects by name, and the error for a missing optional dependency."""

from importlib import import_module
from typing import Any

from composer_models import MissingConditionalImportError

__all__ = ["MissingConditionalImportError", "import_object"]


def import_object(name: str) -> Any:
    """Import an object by its name, such as `'package.module:attribute'`.

    Importing runs the module's code. Never pass a name from a checkpoint or another untrusted source.

    Args:
        name: The module and the attribute, separated by a colon. The attribute may contain dots.

    Raises:
        ValueError: If the name does not have that form.
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
