"""The checkpoints that a run has saved, and the deletion of those that it need not keep."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

from composer_checkpoint._leftovers import discard
from composer_checkpoint.retention import RetentionPolicy, SavedCheckpoint, choose_to_delete
from composer_time import Timestamp

__all__ = ["KeptFiles", "combine_policies"]

log = getLogger(__name__)


def combine_policies(num_checkpoints_to_keep: int, keep: Any) -> RetentionPolicy:
    """Return one policy for the two arguments that a user has.

    Raises:
        ValueError: If one of them is invalid, or both say how many of the newest to keep.
    """
    if type(num_checkpoints_to_keep) is not int or num_checkpoints_to_keep < -1:
        raise ValueError(
            f"save_num_checkpoints_to_keep={num_checkpoints_to_keep!r} is no number of checkpoints: give a whole "
            f"number from 0, or -1 for all."
        )
    if isinstance(keep, Mapping):
        keep = {rule: value for rule, value in keep.items() if rule != "remote"}  # which is for the store
    policy = RetentionPolicy.from_setting(keep)
    if num_checkpoints_to_keep == -1:
        return policy
    if policy.last is not None:
        raise ValueError(
            f"save_num_checkpoints_to_keep={num_checkpoints_to_keep!r} and save_keep={keep!r} both say how many of the "
            f"newest checkpoints to keep. Leave one of them out."
        )
    return RetentionPolicy(num_checkpoints_to_keep, policy.every, policy.metric, policy.mode, policy.num_best)


@dataclass(slots=True)
class KeptFiles:
    """What is on this rank's disk, in the order in which it was saved.

    A file whose upload is under way is deleted after it.

    Attributes:
        policy: What is kept.
        deletes: Whether this rank deletes what goes, or another one does.
        names: The paths of what was saved since this object was made, and is kept.
    """

    policy: RetentionPolicy
    deletes: bool
    names: list[str]
    _history: list[SavedCheckpoint]
    _uploads: dict[str, Future[None]]

    @classmethod
    def under(cls, policy: RetentionPolicy) -> "KeptFiles":
        """Return an empty one."""
        return cls(policy, True, [], [], {})

    def add(
        self, path: str, timestamp: Timestamp, metrics: Mapping[str, float], upload: Future[None] | None = None
    ) -> None:
        """Take note of a checkpoint that was committed. One of the same name is gone."""
        self._history = [saved for saved in self._history if saved.name != path]
        self._history.append(SavedCheckpoint(path, timestamp, dict(metrics)))
        if path in self.names:
            self.names.remove(path)
        self.names.append(path)
        if upload is not None:
            self._uploads[path] = upload

    def rotate(self) -> None:
        """Delete what the policy does not keep; the newest, to which the pointer points, stays unless none does."""
        if self.policy.keeps_all or not self._history:
            return
        keeps_none = self.policy == RetentionPolicy(last=0)
        latest = None if keeps_none else self._history[-1].name
        for path in choose_to_delete(self._history, self.policy, latest=latest):
            upload = self._uploads.get(path)
            if upload is not None and not upload.done():
                continue
            self._uploads.pop(path, None)
            self._history = [saved for saved in self._history if saved.name != path]
            if path in self.names:
                self.names.remove(path)
            if self.deletes and discard(Path(path)):
                log.info("Deleted %s, which save_num_checkpoints_to_keep and save_keep do not keep.", path)

    def state_dict(self) -> list[tuple[str, dict[str, Any], dict[str, float]]]:
        """Return what a checkpoint says about the ones before it."""
        return [(saved.name, saved.timestamp.state_dict(), dict(saved.metrics)) for saved in self._history]

    def load_state_dict(self, saved: Sequence[Any], folder: str) -> None:
        """Take over the checkpoints of the run that is resumed, as far as they are in the folder that is saved to."""
        inside = os.path.abspath(folder)
        self._history = []
        for name, time, metrics in saved:
            path = os.path.abspath(name)
            if os.path.commonpath([inside, path]) == inside and os.path.lexists(path):
                timestamp = Timestamp()
                timestamp.load_state_dict(time)
                self._history.append(SavedCheckpoint(name, timestamp, metrics))
