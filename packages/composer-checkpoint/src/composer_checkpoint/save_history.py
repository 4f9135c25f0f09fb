"""Which checkpoints a run has saved, as each of them says of those before it."""

import uuid
from typing import Any

from composer_checkpoint.discover import LINEAGE_KEY
from composer_checkpoint.kept_files import KeptFiles
from composer_checkpoint.save_names import Save
from composer_checkpoint.state_io import own_file
from composer_checkpoint.uploads import CheckpointUploads
from composer_dist import dist
from composer_time import Timestamp

__all__ = ["SaveHistory"]


class SaveHistory:
    """Takes note of a run's saves, and takes over those of the run that it resumes.

    Args:
        kept: The run's files, some of which are deleted one day.
        uploads: The same in the store.

    Attributes:
        timestamps: When in training each path was saved, also before a resumption.
    """

    def __init__(self, kept: KeptFiles, uploads: CheckpointUploads) -> None:
        self.timestamps: dict[str, Timestamp] = {}
        self._kept = kept
        self._uploads = uploads
        self._saving: Save | None = None
        self._lineage: str | None = None
        self._loaded_kept: Any = ()
        self._loaded_kept_remotely: Any = None

    def begin(self, job: Save) -> None:
        """Take note of a save whose content is about to be collected, so that the checkpoint lists itself."""
        self.timestamps[own_file(job.address or job.path)] = job.timestamp
        self._saving = job

    def end(self) -> None:
        """Take note that its content was collected."""
        self._saving = None

    def lineage(self) -> str:
        """Return what this run's checkpoints share, drawn with the first of them. Every rank must call this."""
        if self._lineage is None:
            drawn = [uuid.uuid4().hex]
            dist.broadcast_object_list(drawn, src=0)
            self._lineage = drawn[0]
        return self._lineage

    def state_dict(self) -> dict[str, Any]:
        """Return which checkpoints there are, those of before a resumption and the one that is saved included."""
        job = self._saving
        own = [] if job is None else [(own_file(job.path), job.timestamp.state_dict(), job.metrics)]
        saved = {
            "all_saved_checkpoints_to_timestamp": [(name, time.state_dict()) for name, time in self.timestamps.items()],
            "kept": [*self._kept.state_dict(), *own],
            LINEAGE_KEY: self._lineage,
        }
        remotely = self._uploads.state_dict(job)
        return saved if remotely is None else {**saved, "kept_remotely": remotely}

    def load_state_dict(self, state: dict[str, Any], *, resumes: bool) -> None:
        """Take over which checkpoints there are.

        Args:
            state: What `state_dict` gave.
            resumes: Whether the run goes on by itself, and its checkpoints belong together with those of before.
        """
        self.timestamps = {}
        for name, saved in state.get("all_saved_checkpoints_to_timestamp", ()):
            timestamp = Timestamp()
            timestamp.load_state_dict(saved)
            self.timestamps[name] = timestamp
        if resumes:
            self._lineage = state.get(LINEAGE_KEY)
        self._loaded_kept = state.get("kept", ())
        self._loaded_kept_remotely = state.get("kept_remotely")

    def take_over(self, folder: str, template: str | None, remote_template: str | None, run_name: str | None) -> None:
        """Let what was loaded be deleted one day, as far as it is where this run saves, and called as it calls its own.

        Args:
            folder: Where it saves.
            template: What its files are called below it.
            remote_template: What they are called in the store, if they are put there.
            run_name: The run's name.
        """
        if self._loaded_kept:
            self._kept.load_state_dict(self._loaded_kept, folder, template or "", run_name)
            self._loaded_kept = ()
        if self._loaded_kept_remotely is not None:
            self._uploads.load_state_dict(self._loaded_kept_remotely, remote_template)
            self._loaded_kept_remotely = None
