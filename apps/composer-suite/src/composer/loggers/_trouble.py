"""Warnings about what keeps a run from being logged, which is no reason to end it."""

import logging
import warnings

__all__ = ["warn_of_trouble"]

_log = logging.getLogger("composer.loggers")


def warn_of_trouble(message: str) -> None:
    """Warn, with a `RuntimeWarning`; where warnings are errors, in Python's log at the level WARNING instead."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        _log.warning(message)
