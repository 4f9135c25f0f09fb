"""Per-rank files that a killed run has written and not come to naming, completed before they are loaded."""

import logging
import os

from composer_checkpoint._leftovers import complete_sets, has_sets
from composer_checkpoint.lock import FolderLock

__all__ = ["complete_interrupted_sets"]

log = logging.getLogger(__name__)


def complete_interrupted_sets(folder: str | os.PathLike[str]) -> None:
    """Give per-rank files their names, all of which were written when the run before was killed. One rank calls this.

    Nothing is done while another run saves there.
    """
    if not has_sets(folder):
        return
    try:
        with FolderLock(folder):
            complete_sets(folder, locked=True)
    except OSError as error:  # in use, or read-only: the set before is as good
        log.warning("Per-rank files in %s that have no names yet are left alone: %s", folder, error)
