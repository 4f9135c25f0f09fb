"""The folder that a run saves to, and that nobody else saves to meanwhile."""

from typing import TYPE_CHECKING

from composer_checkpoint.commit import remove_leftovers
from composer_checkpoint.conflicts import ensure_folder_has_no_conflicting_files, ensure_link_leads_to_no_later_one
from composer_checkpoint.lock import FolderLock
from composer_checkpoint.names import PartialFilePath, format_name_with_dist
from composer_checkpoint.pointers import refuse_folder
from composer_checkpoint.sharded._ranks import Ranks

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["HeldFolder"]


class HeldFolder:
    """Locks a folder for as long as a run saves to it; rank 0 has the lock, and all ranks know of it.

    Args:
        folder: With `{run_name}` and the ranks' placeholders.

    Attributes:
        name: As above.
        is_held: Whether this run has it.
    """

    def __init__(self, folder: str) -> None:
        self.name = folder
        self._lock: FolderLock | None = None
        self.is_held = False

    def take(self, state: "State", refuse_later: str | None = None, link: PartialFilePath | None = None) -> None:
        """Lock the folder, and remove what killed writers have left. Every rank must call this.

        Args:
            state: The training state.
            refuse_later: The template of file names; checkpoints that have such names, and are later than the state
                is, are refused. `None` refuses none.
            link: The link to the latest checkpoint. With `refuse_later` it must not lead to a later one either,
                whatever that is called.

        Raises:
            FolderInUseError: On all ranks, if another process saves there.
            CheckpointConflictError: On all ranks, if there are later checkpoints, or a folder is called as the link.
        """
        ranks = Ranks()
        ranks.together(lambda: self._take(state, refuse_later, link) if ranks.rank == 0 else None)
        self.is_held = True

    def give_back(self) -> None:
        """Unlock the folder, if this run has it."""
        self.is_held = False
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _take(self, state: "State", refuse_later: str | None, link: PartialFilePath | None) -> None:
        folder = format_name_with_dist(self.name, state.run_name)
        if self._lock is None:
            self._lock = FolderLock(folder).acquire()
        try:
            remove_leftovers(folder, locked=True)
            if link is not None:
                refuse_folder(link.format(state))
            if refuse_later is not None:
                ensure_folder_has_no_conflicting_files(folder, refuse_later, state.timestamp)
                if link is not None:
                    ensure_link_leads_to_no_later_one(link.format(state), state.timestamp)
        except BaseException:
            self.give_back()
            raise
