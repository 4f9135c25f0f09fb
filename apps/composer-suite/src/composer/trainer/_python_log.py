"""Python's own logging, as `python_log_level` asks for it."""

import logging
from typing import Any

from composer_dist import get_global_rank

__all__ = ["check_log_level", "set_log_level"]


def check_log_level(level: Any) -> None:
    """Refuse a level of logging that is none.

    Raises:
        ValueError: If it is none.
    """
    known = logging.getLevelNamesMapping()
    if level is not None and (not isinstance(level, str) or level.upper() not in known):
        raise ValueError(f"python_log_level={level!r} must be None or one of {', '.join(map(str.lower, known))}.")


def set_log_level(level: str | None) -> None:
    """Show what Composer's loggers say from this level on, each line with its time, rank, process and thread.

    Without a level nothing is configured. What the application has configured for other loggers stays.
    """
    if level is None:
        return
    who = f"rank{get_global_rank()}[%(process)d][%(threadName)s]"
    logging.basicConfig(format=f"%(asctime)s: {who}: %(levelname)s: %(name)s: %(message)s")
    logging.getLogger("composer").setLevel(level.upper())
