"""The checkpoints that a run has saved, and the deletion of those that it need not keep."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

from composer_checkpoint._leftovers import discard
from composer_checkpoint.conflicts import is_name_of
from composer_checkpoint.errors import CheckpointError, shown
from composer_checkpoint.files import read_manifest
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.retention import RetentionPolicy, SavedCheckpoint, choose_to_delete
from composer_time import Timestamp

__all__ = ["KeptFiles", "combine_policies", "saved_checkpoints"]

log = getLogger(__name__)


def combine_policies(num_checkpoints_to_keep: int, keep: Any) -> RetentionPolicy:
    """Return one policy for the two arguments that a user has.

    Raises:
        ValueError: If one of them is invalid, or both say how many of the newest to keep.
        TypeError: If a length of training is none.
    """
    if type(num_checkpoints_to_keep) is not int or num_checkpoints_to_keep < -1:
        raise ValueError(
            f"save_num_checkpoints_to_keep={num_checkpoints_to_keep!r} is no number of checkpoints: give a whole "
            f"number from 0, or -1 for all."
        )
    if isinstance(keep, Mapping):
        keep = {rule: value for rule, value in keep.items() if rule != "remote"}  # which is for the store
    try:
        policy = RetentionPolicy.from_setting(keep)
    except (TypeError, ValueError) as error:
        raise type(error)(f"save_keep={keep!r} cannot be used: {error}") from error
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
    _of_run: dict[str, str | None]  # what another process has saved, and the run's name

    @classmethod
    def under(cls, policy: RetentionPolicy) -> "KeptFiles":
        """Return an empty one."""
        return cls(policy, True, [], [], {}, {})

    def add(
        self, path: str, timestamp: Timestamp, metrics: Mapping[str, float], upload: Future[None] | None = None
    ) -> None:
        """Take note of a checkpoint that was committed. One of the same name is gone."""
        self._history = [saved for saved in self._history if saved.name != path]
        self._history.append(SavedCheckpoint(path, timestamp, dict(metrics)))
        self._of_run.pop(path, None)
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
            if self.deletes and self._may_delete(path) and discard(Path(path)):
                log.info("Deleted %s, which save_num_checkpoints_to_keep and save_keep do not keep.", path)

    def state_dict(self) -> list[tuple[str, dict[str, Any], dict[str, float]]]:
        """Return what a checkpoint says about the ones before it."""
        return [(saved.name, saved.timestamp.state_dict(), dict(saved.metrics)) for saved in self._history]

    def load_state_dict(self, saved: Sequence[Any], folder: str, template: str, run_name: str | None) -> None:
        """Take over the checkpoints of the run that is resumed, as far as this run could have saved them.

        A checkpoint may come from anybody, and what it lists is deleted one day. So only what is in the folder that
        is saved to, and is called as this run calls its checkpoints, is taken over.

        Args:
            saved: What `state_dict` gave.
            folder: Where checkpoints are saved.
            template: What they are called below it.
            run_name: The run's name, which those that are deleted must have in their manifests.
        """
        self._history, self._of_run = [], {}
        for name, timestamp, metrics in saved_checkpoints(saved):
            if os.path.lexists(name) and _could_have_saved(name, folder, template):
                self._history.append(SavedCheckpoint(name, timestamp, metrics))
                self._of_run[name] = run_name

    def _may_delete(self, path: str) -> bool:
        """Return whether a checkpoint is this run's own: saved by this process, or by its manifest."""
        if path not in self._of_run:
            return True
        run_name = self._of_run.pop(path)
        try:
            is_own = _run_of(Path(path)) == run_name
        except (CheckpointError, OSError) as error:
            log.warning("%s is left, since it cannot be told whose it is: %s", path, error)
            return False
        if not is_own:
            log.warning("%s is left: its manifest does not say that run %r has saved it.", path, run_name)
        return is_own


def saved_checkpoints(saved: Any) -> Iterator[tuple[str, Timestamp, dict[str, float]]]:
    """Go through what a checkpoint says about the ones before it, without what is no such thing."""
    for entry in saved if isinstance(saved, list | tuple) else ():
        timestamp = Timestamp()
        try:
            name, time, metrics = entry
            timestamp.load_state_dict(time)
            yield str(name), timestamp, {metric: float(value) for metric, value in metrics.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            log.warning("The checkpoint that was loaded lists %s, which is no checkpoint.", shown(entry))


def _could_have_saved(name: str, folder: str, template: str) -> bool:
    head, tail = os.path.split(os.path.abspath(name))
    path = os.path.join(os.path.realpath(head), tail)  # a link leads to what is deleted elsewhere
    relative = os.path.relpath(path, os.path.realpath(folder))
    return not os.path.islink(path) and is_name_of(relative, template)


def _run_of(path: Path) -> str | None:
    """Return the run that has saved a checkpoint, as its manifest says; `None` if it does not."""
    if path.is_dir():
        beside = path / MANIFEST_NAME
        manifest = Manifest.from_json(beside.read_bytes()) if beside.is_file() else None
    else:
        manifest = read_manifest(path)
    return None if manifest is None else manifest.info.get("run_name")
