"""What has ended a run, as far as whoever closes it can tell."""

from __future__ import annotations

import sys

__all__ = ["fatal_error"]


def fatal_error(*, was_busy: bool) -> BaseException | None:
    """Return the exception that is on its way or, where work was left undone, has ended the process.

    Python forgets the latter as the exception on its way, and closes what is still open.
    """
    error = sys.exc_info()[1]
    return getattr(sys, "last_value", None) if error is None and was_busy else error
