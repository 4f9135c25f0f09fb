"""The client libraries of services, imported by whoever uses them and by nobody else."""

from importlib import import_module
from typing import Any

from composer_models import MissingConditionalImportError

__all__ = ["require"]


def require(module: str, *, extra: str) -> Any:
    """Import a library that an extra of this distribution brings.

    Raises:
        MissingConditionalImportError: If it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise  # it is installed, and something that it needs is not
        raise MissingConditionalImportError(extra, module.partition(".")[0].replace("_", "-")) from error
