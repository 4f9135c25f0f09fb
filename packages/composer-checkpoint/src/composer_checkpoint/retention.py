"""Retention of checkpoints, on disk and in object stores."""

import math
import os
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, Literal

from composer_checkpoint._durability import discard
from composer_checkpoint.errors import CheckpointError, shown
from composer_checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, SIDECAR_SUFFIX, Manifest
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.save_folder import is_name_of, manifest_of
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, has_object, read_object, retry
from composer_checkpoint.stores.opening import list_if_allowed
from composer_events.arguments import to_time
from composer_events.metric_entries import by_entry, higher_is_better, metric_with, refuse_several
from composer_events.state import State
from composer_time import Time, Timestamp, TimeUnit

log = getLogger(__name__)

_SHARD = re.compile(r"__\d+_\d+\.distcp")
_ATTEMPTS = 3
_RULES = ("last", "every", "best")
_EXAMPLE = "{'last': 3, 'every': '10ep', 'best': ('metrics/eval/MulticlassAccuracy', 'max', 2)}"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A committed checkpoint: its name, its time in training, and its metrics at that time."""

    name: str
    timestamp: Timestamp
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Rules for the checkpoints to keep. A checkpoint is kept if any rule keeps it; without rules, all are kept.

    Args:
        last: The number of newest checkpoints to keep. 0 without other rules keeps none, for folders that are copied
            elsewhere. With any other policy the newest is always kept.
        every: Keeps the first checkpoint at or after each multiple of this length of training.
        metric: Keeps the best checkpoints by this metric; those without it stay until enough have it.
        mode: Whether larger (`'max'`) or smaller (`'min'`) values are better. `None` decides by the metric, or else by
            its name.
        num_best: The number of best checkpoints to keep.

    Raises:
        ValueError: If a number is negative, a length is not positive or has no counter, or `mode` is unknown. If `mode`
            is `None` and required, and neither the metric nor its name tells which values are better.

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
            # `type`, since `isinstance` accepts booleans.
            if count is not None and (type(count) is not int or count < 0):
                raise ValueError(f"{name}={count!r} is not a number of checkpoints: it must be a whole number from 0.")
        if self.mode not in ("max", "min", None):
            raise ValueError(f"mode={self.mode!r} must be 'max' (larger is better), 'min' (smaller is better) or None.")
        if self.every is not None and (self.every.value <= 0 or self.every.unit is TimeUnit.DURATION):
            raise ValueError(
                f"every={str(self.every)!r} is not an interval between checkpoints: it needs a positive number and "
                f"a unit that counts, such as '10ep' or '500ba'."
            )

    @classmethod
    def from_setting(cls, setting: "int | Mapping[str, Any] | RetentionPolicy | None") -> "RetentionPolicy":
        """Create a policy from a user's setting.

        Args:
            setting: -1 or `None` for all, a number of newest checkpoints, or a mapping with some of the keys `last` (a
                number), `every` (a time string) and `best` (metric, `'max'`, `'min'` or `None`, how many).

        Raises:
            ValueError: If the setting has another form.
            TypeError: If `every` is not a length of training.
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
        every = setting.get("every")
        best: Any = setting.get("best")
        match best:
            case None:
                best = {}
            case (str(metric), str() | None as mode, int(num_best)) if num_best != 0:
                best = {"metric": metric, "mode": mode, "num_best": num_best}
            case _:
                raise ValueError(
                    f"best={best!r} does not say which checkpoints are best: give the metric, 'max', 'min' or None, "
                    f"and how many, such as ('metrics/eval/MulticlassAccuracy', 'max', 2)."
                )
        return cls(setting.get("last"), None if every is None else to_time("every", every), **best)

    def with_mode(self, metric: object = None) -> "RetentionPolicy":
        """Return the policy with a mode if it needs one, chosen by the metric or else by its name.

        Raises:
            ValueError: If neither tells which values are better.
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
        """Return whether no checkpoint is ever deleted."""
        return self.last is None and self.every is None and self.metric is None

    @property
    def keeps_none(self) -> bool:
        """Return whether each checkpoint is deleted once it has been saved."""
        return self == RetentionPolicy(last=0)


def choose_to_delete(
    history: Sequence[SavedCheckpoint], policy: RetentionPolicy, *, latest: str | None = None
) -> list[str]:
    """Return the names of the checkpoints that the policy does not keep, oldest first.

    The result depends only on the arguments. A second call after the deletion deletes nothing more.

    Args:
        history: The existing checkpoints, in the order in which they were committed.
        policy: The rules.
        latest: The target of the pointer, which is never deleted.

    Example:
        >>> history = [SavedCheckpoint(f"ep{epoch}", Timestamp(epoch=epoch)) for epoch in range(1, 8)]
        >>> choose_to_delete(history, RetentionPolicy.from_setting({"last": 2, "every": "3ep"}))
        ['ep1', 'ep2', 'ep4', 'ep5']
    """
    if policy.keeps_all:
        return []
    # The start is computed, since a slice from -0 would keep all.
    keep = {latest} | {saved.name for saved in history[len(history) - min(policy.last or 0, len(history)) :]}
    if policy.every is not None:
        first: dict[int, str] = {}  # of each interval, so that deleting later ones does not change the result
        for saved in history:
            interval = int(saved.timestamp.get(policy.every.unit).value // policy.every.value)
            if interval > 0:  # checkpoints before the first multiple belong to no rule
                first.setdefault(interval, saved.name)
        keep |= set(first.values())
    if policy.metric is not None:
        keep |= _best_by(history, policy.metric, policy.with_mode().mode, policy.num_best)
    if not policy.keeps_none:
        keep |= {saved.name for saved in history[-1:]}
    return [saved.name for saved in history if saved.name not in keep]


def _best_by(history: Sequence[SavedCheckpoint], metric: str, mode: str | None, num_best: int) -> set[str]:
    """Return the best checkpoints, the oldest among equal ones, so that a new one replaces only worse ones.

    While fewer checkpoints have the metric than are to be kept, those without it are kept too.
    """
    sign = -1 if mode == "max" else 1
    measured = [(saved, saved.metrics[metric]) for saved in history if metric in saved.metrics]
    # Without NaN, which compares with nothing and would break the order.
    ranked = sorted((pair for pair in measured if not math.isnan(pair[1])), key=lambda pair: sign * pair[1])
    unmeasured = {saved.name for saved in history if metric not in saved.metrics}
    return {saved.name for saved, _ in ranked[:num_best]} | (unmeasured if len(ranked) < num_best else set())


def combine_policies(num_checkpoints_to_keep: int, keep: Any) -> RetentionPolicy:
    """Return one policy for the two arguments of a user, which must not both set the number of newest checkpoints."""
    if type(num_checkpoints_to_keep) is not int or num_checkpoints_to_keep < -1:
        raise ValueError(
            f"save_num_checkpoints_to_keep={num_checkpoints_to_keep!r} must be a whole number from 0, or -1 for all."
        )
    # The rules under `remote` are for the store, see `remote_policy`.
    local = {rule: value for rule, value in keep.items() if rule != "remote"} if isinstance(keep, Mapping) else keep
    policy = _named_policy(f"save_keep={keep!r} cannot be used", local)
    if num_checkpoints_to_keep == -1:
        return policy
    if policy.last is not None:
        raise ValueError(
            f"save_num_checkpoints_to_keep={num_checkpoints_to_keep!r} and save_keep={keep!r} both say how many of the "
            f"newest checkpoints to keep. Leave one of them out."
        )
    return replace(policy, last=num_checkpoints_to_keep)


def _named_policy(told: str, setting: Any) -> RetentionPolicy:
    try:
        return RetentionPolicy.from_setting(setting)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{told}: {error}") from error  # of the same class, with the argument named


class _Kept:
    """Checkpoints that a run has saved to one place, in order, with the rules for keeping them."""

    def __init__(self, policy: RetentionPolicy) -> None:
        self.policy = policy
        self._history: list[SavedCheckpoint] = []
        self._uploads: dict[str, Future[Any]] = {}

    def _add(self, name: str, timestamp: Timestamp, metrics: Mapping[str, float], upload: Future[Any] | None) -> None:
        self._forget(name)  # re-inserted as the newest
        self._history.append(SavedCheckpoint(name, timestamp, dict(metrics)))
        if upload is not None:
            self._uploads[name] = upload

    def _forget(self, name: str) -> None:
        self._history = [saved for saved in self._history if saved.name != name]
        self._uploads.pop(name, None)

    def entries(self) -> list[tuple[str, dict[str, Any], dict[str, float]]]:
        """Return the list of checkpoints, to save in the next checkpoint."""
        return [(saved.name, saved.timestamp.state_dict(), dict(saved.metrics)) for saved in self._history]

    def _adopt(self, entries: Any, could_have_saved: Callable[[str], bool]) -> None:
        """Take over those checkpoints of the resumed run that this run could have saved.

        The list may come from an untrusted source, and what it names may be deleted later.
        """
        for entry in entries if isinstance(entries, list | tuple) else ():
            timestamp = Timestamp()
            # Skipped, not raised: a bad entry must not prevent a resume.
            try:
                name, time, metrics = entry
                timestamp.load_state_dict(time)
                metrics = {metric: float(value) for metric, value in metrics.items()}
            except (AttributeError, KeyError, TypeError, ValueError):
                log.warning(
                    "The loaded checkpoint lists %s among the saved checkpoints, which is invalid.", shown(entry)
                )
                continue
            if could_have_saved(str(name)):
                self._add(str(name), timestamp, metrics, None)


class KeptFiles(_Kept):
    """Checkpoints on this rank's disk. A file that is being uploaded is not deleted before the upload ends.

    Attributes:
        policy: The rules.
        deletes: Whether this rank deletes the files; another rank does otherwise.
        names: The kept paths that were saved since this object was created.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        super().__init__(policy)
        self.deletes = True
        self.names: list[str] = []
        self._run_name: str | None = None
        self._adopted = set[str]()  # paths that another process has saved

    def add(
        self, path: str, timestamp: Timestamp, metrics: Mapping[str, float], upload: Future[None] | None = None
    ) -> None:
        """Record a committed checkpoint, which replaces an earlier one of the same name."""
        self._add(path, timestamp, metrics, upload)
        self._adopted.discard(path)
        self.names.append(path)

    def rotate(self) -> None:
        """Delete checkpoints by the policy. The newest, the pointer's target, is kept unless the policy keeps none."""
        if self.policy.keeps_all or not self._history:
            return
        latest = None if self.policy.keeps_none else self._history[-1].name
        for path in choose_to_delete(self._history, self.policy, latest=latest):
            if path in self._uploads and not self._uploads[path].done():  # it is being read; a later call deletes it
                continue
            # Forgotten even if it is left on the disk: a failed deletion is logged once and not repeated at each save.
            self._forget(path)
            if self.deletes and self._may_delete(path) and discard(Path(path)):
                log.info("Deleted %s by the rules of save_num_checkpoints_to_keep and save_keep.", path)

    def adopt(self, saved: Any, folder: str, template: str, run_name: str | None) -> None:
        """Take over the checkpoints of the resumed run: files in the save folder that match this run's template.

        They are deleted only if their manifests have the run's name.
        """

        def could_have_saved(name: str) -> bool:
            head, tail = os.path.split(os.path.abspath(name))
            path = os.path.join(os.path.realpath(head), tail)  # a link in the path would lead the deletion elsewhere
            is_file = os.path.lexists(name) and not os.path.islink(path)
            return is_file and is_name_of(os.path.relpath(path, os.path.realpath(folder)), template)

        self._history, self._run_name = [], run_name
        self._adopt(saved, could_have_saved)
        self._adopted = {saved.name for saved in self._history}

    def _forget(self, name: str) -> None:
        super()._forget(name)
        if name in self.names:
            self.names.remove(name)

    def _may_delete(self, path: str) -> bool:
        if path not in self._adopted:
            return True
        self._adopted.discard(path)
        try:
            manifest = manifest_of(Path(path))
        except (CheckpointError, OSError) as error:
            log.warning("%s is not deleted, since its run is unknown: %s", path, error)
            return False
        is_own = manifest is not None and manifest.info.get("run_name") == self._run_name
        if not is_own:
            log.warning("%s is not deleted: by its manifest, run %r has not saved it.", path, self._run_name)
        return is_own


def remote_policy(num_to_keep: int, keep: Any, local: RetentionPolicy) -> tuple[RetentionPolicy | None, str]:
    """Return the policy for a store, `None` to keep all, and the argument that sets it."""
    setting = keep.get("remote") if isinstance(keep, Mapping) else None
    if setting is not None and num_to_keep != -1:
        raise ValueError(
            f"remote_num_checkpoints_to_keep={num_to_keep!r} and save_keep={keep!r} both say what to keep in the "
            f"store. Leave one of them out."
        )
    said = f"save_keep={keep!r}" if setting is not None else f"remote_num_checkpoints_to_keep={num_to_keep!r}"
    rules = local if setting is True else num_to_keep if setting is None else setting
    policy = _named_policy(f"{said} cannot be used for the store", rules)
    if setting is True and policy.keeps_all:
        raise ValueError(f"{said} has no rules besides. Add some, such as {{'last': 3, 'remote': True}}.")
    if policy.keeps_none:
        raise ValueError(f"{said} would leave no checkpoint in the store. Keep 1 or more there.")
    return (None if policy.keeps_all else policy), said


class KeptRemotely(_Kept):
    """Checkpoints that a run has saved to its store.

    Only checkpoints of this run are ever deleted, and only while a later one is complete in the store. Errors of the
    rules, such as for a store that cannot delete, name `said`, the argument that set them.
    """

    def __init__(self, policy: RetentionPolicy, said: str, uploader: RemoteUploader | None) -> None:
        super().__init__(policy)
        if uploader is None:
            raise ValueError(f"{said} is for checkpoints in a store, and save_folder is a folder of this machine.")
        store = uploader.remote_backend
        # Checked before training instead of at the first deletion.
        if type(store).delete_object is ObjectStore.delete_object:
            raise ValueError(f"{said}: {type(store).__name__} cannot delete. Leave it out, or save to another store.")
        self._uploader = uploader
        self._files: dict[str, Sequence[str]] = {}
        self._deletions: dict[str, Future[bool | None]] = {}
        self._deleted: set[str] = set()
        self._is_due = False  # whether `rotate` has something to do although no upload has ended

    def add(
        self,
        name: str,
        of_all_ranks: Sequence[str],
        timestamp: Timestamp,
        metrics: Mapping[str, float],
        upload: Future[None] | None,
    ) -> None:
        """Record a checkpoint, which replaces an earlier one of the same name, and its upload if that has not ended.

        This rank has uploaded it as `name`, and may delete that. `of_all_ranks` are the names of the files of all
        ranks.
        """
        self._add(name, timestamp, metrics, upload)
        self._files[name] = of_all_ranks
        self._deleted.discard(name)
        self._is_due |= upload is None

    def rotate(self) -> None:
        """Begin to delete uploaded checkpoints that the policy does not keep."""
        self._note_deletions()
        ended = [name for name, upload in self._uploads.items() if upload.done()]
        if not ended and not self._is_due:  # nothing has changed since the last call
            return
        self._is_due = False
        for name in ended:
            upload = self._uploads.pop(name)
            # A failed upload must not count as the newest checkpoint, for which older ones are deleted.
            if upload.cancelled() or upload.exception() is not None:
                self._forget(name)
        arrived = [saved for saved in self._history if saved.name not in self._uploads]
        newest = arrived[-1].name if arrived else None
        for name in choose_to_delete(arrived, self.policy, latest=newest):
            if name not in self._deletions:
                # In the queue of the name, so that a new upload of it is not deleted.
                deletion = partial(self._delete, name, self._files.get(str(newest), [str(newest)]))
                self._deletions[name] = self._uploader.run_async(name, deletion)

    def has_deleted(self, name: str) -> bool:
        """Return whether this process has deleted a checkpoint and not saved it again."""
        self._note_deletions()
        return name in self._deleted

    def state_dict(self) -> dict[str, Any]:
        """Return the list of checkpoints, to save in the next checkpoint."""
        return {"remote_folder": self._uploader.remote_folder, "saved": self.entries()}

    def adopt(self, state: Mapping[str, Any], template: str) -> None:
        """Take over the checkpoints of the resumed run, if it saved to the same place."""
        if state.get("remote_folder") == self._uploader.remote_folder:
            self._adopt(state.get("saved"), lambda name: is_name_of(name, template))
            self._is_due = True

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._files.pop(name, None)
        self._deletions.pop(name, None)

    def _note_deletions(self) -> None:
        """Record deletions that have ended. Called in the main thread, since only it may change the history."""
        for name, deletion in list(self._deletions.items()):
            if not deletion.done() or deletion.cancelled() or (has_deleted := deletion.result()) is None:
                continue  # still running, or failed: failed deletions are not retried
            if has_deleted:
                self._forget(name)
                self._deleted.add(name)
            else:
                del self._deletions[name]
                self._is_due = True

    def _delete(self, name: str, replaced_by: Sequence[str]) -> bool | None:
        """Return whether the checkpoint was deleted, or `None` after an error."""
        store = self._uploader.remote_backend
        try:
            # The replacement may have been deleted or be incomplete, so look before each deletion.
            if not all(is_whole(store, other) for other in replaced_by):
                return False
            delete_checkpoint(store, name)
        # Logged, not raised: an extra checkpoint must not stop training.
        except (CheckpointError, OSError, NotImplementedError) as error:
            log.warning("%s is left in the store, and could not be deleted: %s", store.get_uri(name), error)
            return None
        log.info("Deleted %s, which the retention rules do not keep.", store.get_uri(name))
        return True


def is_whole(store: ObjectStore, name: str) -> bool:
    """Return whether a store has a file of this name, or a folder with a manifest, which is uploaded last."""
    return any(has_object(store, vouching, _ATTEMPTS) for vouching in (name, f"{name}/{MANIFEST_NAME}"))


def delete_checkpoint(store: ObjectStore, name: str) -> None:
    """Delete a checkpoint from a store, its manifest first, so that a partial deletion leaves no valid checkpoint.

    In a folder, only files that its manifest lists and files named like shards are deleted. An interrupted deletion is
    finished by the next one.

    Example:
        >>> import tempfile
        >>> from composer_checkpoint.stores import FsspecObjectStore
        >>> store = FsspecObjectStore("memory://docs-deletion")
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     store.upload_object("run/ep1.pt", file.name)
        >>> delete_checkpoint(store, "run/ep1.pt")
        >>> store.list_objects("run/")
        []
    """
    again = retry(ObjectStoreTransientError, _ATTEMPTS)
    listed: set[str] = set()
    with suppress(FileNotFoundError):
        manifest = Manifest.from_json(again(read_object)(store, f"{name}/{MANIFEST_NAME}"))
        # Only plain names: the manifest comes from the store, and must not lead out of the folder.
        listed = {part for part in manifest.files if posixpath.basename(part) == part}
    # Shards are also found by their names, since an interrupted deletion has left them without a manifest.
    shards = {posixpath.basename(part) for part in list_if_allowed(store, f"{name}/")}
    parts = (listed | {part for part in shards if _SHARD.fullmatch(part)}) - {MANIFEST_NAME, METADATA_NAME}
    if parts:
        objects = [f"{name}/{part}" for part in (MANIFEST_NAME, METADATA_NAME, *sorted(parts))]
    else:
        objects = [name + SIDECAR_SUFFIX, name]
    for one in objects:
        again(store.delete_object)(one)


class MetricHistory:
    """Latest values of the metrics that retention ranks checkpoints by."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def note(self, state: State, metrics: set[str]) -> None:
        """Record the metrics of an evaluation that has ended."""
        label = state.dataloader_label
        for name in () if label is None else state.eval_metrics.get(label, ()):
            if name in state.eval_metric_values:
                self._values |= by_entry({f"metrics/{label}/{name}": state.eval_metric_values[name]})
        # Metrics of other evaluators and of training may still be measured later.
        to_come = tuple(f"metrics/{other}/" for other in {*state.eval_metrics, "train"} - {label})
        for metric in metrics - self._values.keys():
            if metric.startswith("metrics/") and not metric.startswith(to_come):
                raise ValueError(
                    f"save_keep keeps the best checkpoints by {metric!r}, which no evaluation measures. Measured are "
                    f"{', '.join(self._values) or 'no metrics'}. Name one of these, or add the metric to the model or "
                    f"the evaluator."
                )

    def by_now(self, state: State, metrics: set[str]) -> dict[str, float]:
        """Return the current values of some metrics, including training metrics and losses. Missing ones are logged."""
        if not metrics:
            return {}
        train = by_entry({f"metrics/train/{name}": value for name, value in state.train_metric_values.items()})
        known = {**train, **state.total_loss_dict, **self._values}
        for metric in metrics - known.keys():
            log.warning(
                "The best checkpoints by %r are not known yet, since it has not been measured. Measured were: %s.",
                metric,
                ", ".join(known) or "none",
            )
        return {metric: float(known[metric]) for metric in metrics & known.keys()}


def metric_of(state: State, logged_name: str | None) -> object:
    """Return the metric that is logged as `metrics/<label>/<name>`, or has an entry of this name, or `None`."""
    metrics = {"train": state.train_metrics or {}, **state.eval_metrics}
    logged = {f"metrics/{label}/{name}": one for label, of_label in metrics.items() for name, one in of_label.items()}
    if logged_name is None or (name := metric_with(logged, logged_name)) is None:
        return None
    refuse_several(name, logged[name], logged_name)
    return logged[name]
