"""The checkpoints that a run has saved to a store, and the deletion of those that it need not keep there."""

import posixpath
import re
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any

from composer_checkpoint.conflicts import is_name_of
from composer_checkpoint.errors import CheckpointError
from composer_checkpoint.kept_files import saved_checkpoints
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.retention import RetentionPolicy, SavedCheckpoint, choose_to_delete
from composer_checkpoint.retry import retry
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError
from composer_checkpoint.stores.opening import list_if_allowed
from composer_checkpoint.upload import RemoteUploader
from composer_time import Timestamp

__all__ = ["KeptRemotely", "delete_checkpoint", "is_whole", "remote_policy"]

log = getLogger(__name__)

_INDEX_NAME = ".metadata"
_FILE_MANIFEST_SUFFIX = ".manifest.json"
_SHARD = re.compile(r"__\d+_\d+\.distcp")
_ATTEMPTS = 3


def remote_policy(num_to_keep: int, keep: Any, local: RetentionPolicy) -> tuple[RetentionPolicy | None, str]:
    """Return which checkpoints are kept in a store, `None` for all, and which argument says so.

    Args:
        num_to_keep: `remote_num_checkpoints_to_keep`.
        keep: `save_keep`, whose key `remote` is `True` for the same rules as here, or has rules of its own.
        local: The rules for this machine's disk.

    Raises:
        ValueError: If there are no rules to take over, none would be kept, or both arguments say something.
        TypeError: If a length of training is none.
    """
    setting = keep.get("remote") if isinstance(keep, Mapping) else None
    if setting is not None and num_to_keep != -1:
        raise ValueError(
            f"remote_num_checkpoints_to_keep={num_to_keep!r} and save_keep={keep!r} both say what to keep in the "
            f"store. Leave one of them out."
        )
    said = f"save_keep={keep!r}" if setting is not None else f"remote_num_checkpoints_to_keep={num_to_keep!r}"
    try:
        policy = local if setting is True else RetentionPolicy.from_setting(num_to_keep if setting is None else setting)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{said} cannot be used for the store: {error}") from error
    if setting is True and policy.keeps_all:
        raise ValueError(f"{said} has no rules besides. Add some, such as {{'last': 3, 'remote': True}}.")
    if policy == RetentionPolicy(last=0):
        raise ValueError(f"{said} would leave no checkpoint in the store. Keep 1 or more there.")
    return (None if policy.keeps_all else policy), said


@dataclass(slots=True)
class KeptRemotely:
    """What a run has saved to its store, in the order in which it was saved.

    Only what this run has put there is ever deleted, and only while a later checkpoint is whole in the store.

    Attributes:
        policy: What is kept.
        uploader: Of the store; deletes in the background.
        deleted: What this process has deleted and not saved again.
    """

    policy: RetentionPolicy
    uploader: RemoteUploader
    deleted: set[str] = field(default_factory=set)
    _history: list[SavedCheckpoint] = field(default_factory=list)
    _awaited: dict[str, Future[None] | None] = field(default_factory=dict)
    _names: dict[str, list[str]] = field(default_factory=dict)
    _going: set[str] = field(default_factory=set)
    _postponed: bool = False
    _gone: deque[str] = field(default_factory=deque)  # told by the threads that delete

    @classmethod
    def under(cls, policy: RetentionPolicy | None, said: str, uploader: RemoteUploader | None) -> "KeptRemotely | None":
        """Return an empty one, or `None` where all is kept.

        Args:
            policy: The rules; `None` for none.
            said: Which argument has them, for the error.
            uploader: Of the store, if there is one.

        Raises:
            ValueError: If there is no store that could delete.
        """
        if policy is None:
            return None
        if uploader is None:
            raise ValueError(f"{said} is for checkpoints in a store, and save_folder is a folder of this machine.")
        store = uploader.remote_backend
        if type(store).delete_object is ObjectStore.delete_object:
            raise ValueError(f"{said}: {type(store).__name__} cannot delete. Leave it out, or save to another store.")
        return cls(policy, uploader)

    def add(
        self,
        name: str,
        of_all_ranks: Sequence[str],
        timestamp: Timestamp,
        metrics: Mapping[str, float],
        upload: Future[None] | None,
    ) -> None:
        """Take note of a checkpoint. One of the same name is gone.

        Args:
            name: What this rank has put there, and may delete.
            of_all_ranks: What belongs to the same checkpoint, whoever has put it there.
            timestamp: When it was saved.
            metrics: What was measured by then.
            upload: What is under way; `None` if it is there.
        """
        self._history = [saved for saved in self._history if saved.name != name]
        self._history.append(SavedCheckpoint(name, timestamp, dict(metrics)))
        self._names[name] = list(of_all_ranks)
        self._going.discard(name)
        self.deleted.discard(name)
        self._awaited[name] = upload

    def rotate(self) -> None:
        """Begin to delete what the policy does not keep of what has arrived."""
        ended = {name: upload for name, upload in self._awaited.items() if upload is None or upload.done()}
        if not ended and not self._postponed:
            return
        self._postponed = False
        for name, upload in ended.items():
            del self._awaited[name]
            if upload is not None and (upload.cancelled() or upload.exception() is not None):
                self._forget(name)
        while self._gone:
            self._forget(self._gone.popleft())
        arrived = [saved for saved in self._history if saved.name not in self._awaited]
        if not arrived:
            return
        newest = arrived[-1].name
        for name in choose_to_delete(arrived, self.policy, latest=newest):
            if name not in self._going:
                self._going.add(name)
                self.uploader.run_async(name, self._deletion(name, self._names.get(newest, [newest])))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint says about the ones before it."""
        saved = [(saved.name, saved.timestamp.state_dict(), dict(saved.metrics)) for saved in self._history]
        return {"remote_folder": self.uploader.remote_folder, "saved": saved}

    def load_state_dict(self, state: Mapping[str, Any], template: str) -> None:
        """Take over what the run that is resumed has saved, if it is to the same place that is saved now.

        Args:
            state: What `state_dict` gave. It may come from anybody, so that nothing else is ever deleted than what
                this run could have saved.
            template: What this run's checkpoints are called in the store, with the run's name filled in.
        """
        if state.get("remote_folder") != self.uploader.remote_folder:
            return
        for name, timestamp, metrics in saved_checkpoints(state.get("saved")):
            if is_name_of(name, template):
                self.add(name, [name], timestamp, metrics, None)

    def _forget(self, name: str) -> None:
        self._history = [saved for saved in self._history if saved.name != name]
        self._names.pop(name, None)
        self._going.discard(name)

    def _deletion(self, name: str, replaced_by: list[str]) -> Callable[[], None]:
        def delete() -> None:
            store = self.uploader.remote_backend
            try:
                if not all(is_whole(store, other) for other in replaced_by):
                    self._going.discard(name)
                    self._postponed = True
                    return
                delete_checkpoint(store, name)
            except (CheckpointError, OSError, NotImplementedError) as error:
                log.warning("%s is left in the store, and could not be deleted: %s", store.get_uri(name), error)
                return
            self.deleted.add(name)
            self._gone.append(name)
            log.info("Deleted %s, which need not be kept.", store.get_uri(name))

        return delete


def is_whole(store: ObjectStore, name: str) -> bool:
    """Return whether a store has a file of a name, or a folder with what makes it whole."""
    look_up = retry(ObjectStoreTransientError, _ATTEMPTS)(store.get_object_size)
    for vouching in (name, f"{name}/{MANIFEST_NAME}"):
        try:
            look_up(vouching)
        except FileNotFoundError:
            continue
        return True
    return False


def delete_checkpoint(store: ObjectStore, name: str) -> None:
    """Delete a checkpoint from a store: first what makes it whole, so that nobody takes the rest for one.

    Of a folder, only what its manifest lists and what is named like a shard goes. What a deletion that was cut short
    has left is deleted by the next.

    Args:
        store: Where it is.
        name: A file's name, or a folder's.

    Raises:
        StorageError: If the store refuses, or still fails at the last attempt.

    Example:
        >>> from composer_checkpoint.stores import FsspecObjectStore
        >>> store = FsspecObjectStore("memory://docs-deletion")
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     store.upload_object("run/ep1.pt", file.name)
        >>> delete_checkpoint(store, "run/ep1.pt")
        >>> store.list_objects("run/")
        []
    """
    delete = retry(ObjectStoreTransientError, _ATTEMPTS)(store.delete_object)
    parts = _parts(store, name)
    for vouching in (f"{name}/{MANIFEST_NAME}", f"{name}/{_INDEX_NAME}") if parts else (name + _FILE_MANIFEST_SUFFIX,):
        delete(vouching)
    for part in parts or [name]:
        delete(part)


def _parts(store: ObjectStore, name: str) -> list[str]:
    """Return the objects of a folder that are the checkpoint's, besides what makes it whole; none of a file."""
    listed: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "manifest")
        try:
            retry(ObjectStoreTransientError, _ATTEMPTS)(store.download_object)(f"{name}/{MANIFEST_NAME}", copy)
            listed = {part for part in Manifest.from_json(copy.read_bytes()).files if posixpath.basename(part) == part}
        except FileNotFoundError:
            pass
    shards = {posixpath.basename(part) for part in list_if_allowed(store, f"{name}/")}
    found = listed | {part for part in shards if _SHARD.fullmatch(part)}
    return [f"{name}/{part}" for part in sorted(found - {MANIFEST_NAME, _INDEX_NAME})]
