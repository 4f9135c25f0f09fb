"""The error for an optional dependency that is missing."""

from composer_models import MissingConditionalImportError

__all__ = ["MissingConditionalImportError"]
