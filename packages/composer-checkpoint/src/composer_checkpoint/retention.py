"""Which checkpoints are kept, and which may be deleted."""

import math
import os
import posixpath
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, cast

from composer_checkpoint.errors import CheckpointError, shown
from composer_checkpoint.files import read_manifest
from composer_checkpoint.lock import discard
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.save_folder import is_name_of
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, retry
from composer_checkpoint.stores.opening import list_if_allowed
from composer_events.arguments import to_time
from composer_events.metric_entries import higher_is_better
from composer_time import Time, Timestamp, TimeUnit

__all__ = [
    "KeptFiles",
    "combine_policies",
    "saved_checkpoints",
    "KeptRemotely",
    "delete_checkpoint",
    "is_whole",
    "remote_policy",
    "RetentionPolicy",
    "SavedCheckpoint",
    "choose_to_delete",
]

_RULES = ("last", "every", "best")
_EXAMPLE = "{'last': 3, 'every': '10ep', 'best': ('metrics/eval/MulticlassAccuracy', 'max', 2)}"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was committed: its name, when in training, and what was measured by then."""

    name: str
    timestamp: Timestamp
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which checkpoints are kept: those that any of the rules keeps. Without a rule, all.

    Args:
        last: How many of the newest to keep. 0, without other rules, keeps none at all: for folders that are copied
            elsewhere. Otherwise the newest is kept whatever the rules are.
        every: Keeps the first one at or after each multiple of this length of training.
        metric: Keeps the best by this metric, and those of which it is not known until enough are.
        mode: Whether a larger (`'max'`) or a smaller (`'min'`) value is better. `None` goes by the metric itself, or
            else by its name.
        num_best: How many of the best to keep.

    Raises:
        ValueError: If a number is negative, a length is not positive or has no counter, or `mode` is something else.
            Where `mode` is `None`, and neither metric nor name says which values are better, when that is needed.

    Example:
        >>> RetentionPolicy.from_setting({"last": 2, "every": "10ep"})
        RetentionPolicy(last=2, every=Time(10, TimeUnit.EPOCH), metric=None, mode=None, num_best=0)
    """

    last: int | None = None
    every: Time[Any] | None = None
    metric: str | None = None
    mode: Literal["max", "min"] | None = None
    num_best: int = 0

    def __post_init__(self) -> None:
        for name, count in (("last", self.last), ("num_best", self.num_best)):
            if count is not None and (type(count) is not int or count < 0):
                raise ValueError(f"{name}={count!r} is no number of checkpoints: it must be a whole number from 0.")
        if self.mode not in ("max", "min", None):
            raise ValueError(f"mode={self.mode!r} must be 'max' or 'min', whichever values are better, or None.")
        if self.every is not None and (self.every.value <= 0 or self.every.unit is TimeUnit.DURATION):
            raise ValueError(
                f"every={str(self.every)!r} is no interval between checkpoints to keep: it needs a positive number and "
                f"a unit that counts, such as '10ep' or '500ba'."
            )

    @classmethod
    def from_setting(cls, setting: "int | Mapping[str, Any] | RetentionPolicy | None") -> "RetentionPolicy":
        """Read what a user typed.

        Args:
            setting: -1 or `None` for all, a number for that many of the newest, or a mapping with some of the keys
                `last` (a number), `every` (a time string) and `best` (metric, `'max'`, `'min'` or `None`, how many).

        Raises:
            ValueError: If it is none of these.
            TypeError: If `every` is no length of training.
        """
        if isinstance(setting, RetentionPolicy):
            return setting
        if setting is None or setting == -1:
            return cls()
        if isinstance(setting, int):
            return cls(last=setting)
        if not isinstance(setting, Mapping) or not set(setting) <= set(_RULES):
            raise ValueError(
                f"{setting!r} does not say which checkpoints to keep: give a number, -1 for all, or a mapping with "
                f"some of the keys {', '.join(_RULES)}, such as {_EXAMPLE}."
            )
        metric, mode, num_best = _best(setting.get("best"))
        every = setting.get("every")
        return cls(setting.get("last"), None if every is None else to_time("every", every), metric, mode, num_best)

    def with_mode(self, metric: object = None) -> "RetentionPolicy":
        """Return the policy with a mode where it needs one, by its metric or else by the metric's name.

        Raises:
            ValueError: If neither says which values are better.
        """
        if self.metric is None or self.mode is not None:
            return self
        is_higher = higher_is_better(self.metric, metric)
        if is_higher is None:
            raise ValueError(
                f"best: neither the metric {self.metric!r} nor its name says whether larger or smaller values are "
                f"better. Say 'max' or 'min', as in ({self.metric!r}, 'max', {self.num_best}), or give the metric an "
                f"attribute higher_is_better."
            )
        return replace(self, mode="max" if is_higher else "min")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever deleted."""
        return self.last is None and self.every is None and self.metric is None


def choose_to_delete(
    history: Sequence[SavedCheckpoint], policy: RetentionPolicy, *, latest: str | None = None
) -> list[str]:
    """Return the names of the checkpoints that the policy does not keep, oldest first.

    The decision depends only on the arguments. Applied again after the deletion it deletes nothing more.

    Args:
        history: What exists, in the order in which it was committed.
        policy: The rules.
        latest: What the pointer points to, which is never deleted.

    Example:
        >>> history = [SavedCheckpoint(f"ep{epoch}", Timestamp(epoch=epoch)) for epoch in range(1, 8)]
        >>> choose_to_delete(history, RetentionPolicy.from_setting({"last": 2, "every": "3ep"}))
        ['ep1', 'ep2', 'ep4', 'ep5']
    """
    if policy.keeps_all:
        return []
    keep = {latest} | {saved.name for saved in history[len(history) - min(policy.last or 0, len(history)) :]}
    if policy.every is not None:
        keep |= _first_of_each(history, policy.every)
    if policy.metric is not None:
        keep |= _best_by(history, policy.metric, policy.with_mode().mode, policy.num_best)
    if policy != RetentionPolicy(last=0):
        keep |= {saved.name for saved in history[-1:]}
    return [saved.name for saved in history if saved.name not in keep]


def _first_of_each(history: Sequence[SavedCheckpoint], every: Time[Any]) -> set[str]:
    """Keep the first of each interval: it stays the first when others of the interval go."""
    first: dict[int, str] = {}
    for saved in history:
        interval = int(saved.timestamp.get(every.unit).value // every.value)
        if interval > 0:
            first.setdefault(interval, saved.name)
    return set(first.values())


def _best_by(history: Sequence[SavedCheckpoint], metric: str, mode: str | None, num_best: int) -> set[str]:
    """Keep the best; of equals the oldest, so that none is deleted in favour of one that is no better.

    While fewer are measured than are to be kept, none is given up that was not.
    """
    sign = -1 if mode == "max" else 1
    measured = [(saved, saved.metrics[metric]) for saved in history if metric in saved.metrics]
    ranked = sorted((pair for pair in measured if not math.isnan(pair[1])), key=lambda pair: sign * pair[1])
    unmeasured = {saved.name for saved in history if metric not in saved.metrics}
    return {saved.name for saved, _ in ranked[:num_best]} | (unmeasured if len(ranked) < num_best else set())


def _best(setting: Any) -> tuple[str | None, Literal["max", "min"] | None, int]:
    if setting is None:
        return None, None, 0
    match setting:
        case (str(metric), str() | None as mode, int(num_best)) if num_best != 0:
            return metric, cast(Literal["max", "min"] | None, mode), num_best
    raise ValueError(
        f"best={setting!r} does not say which checkpoints are best: give the metric, 'max', 'min' or None, and how "
        f"many, such as ('metrics/eval/MulticlassAccuracy', 'max', 2)."
    )


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
