"""A callback that saves the training state at intervals."""

import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from composer_checkpoint._ranks import Ranks
from composer_checkpoint.async_save import AsyncSaver
from composer_checkpoint.checkpoint_uploads import CheckpointUploads, Save, template_of_run, within_folder
from composer_checkpoint.commit import replace_pointer
from composer_checkpoint.formats.archives import check_compressor
from composer_checkpoint.ignore_keys import IgnoreKeys, check_ignore_keys
from composer_checkpoint.names import OF_FOLDER, OF_SAVE, PartialFilePath, check_filename
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.retention import (
    KeptFiles,
    KeptRemotely,
    MetricHistory,
    combine_policies,
    metric_of,
    remote_policy,
)
from composer_checkpoint.save_folder import LINEAGE_KEY, HeldFolder
from composer_checkpoint.state import (
    Layout,
    collect,
    describe,
    layout_of,
    own_file,
    path_of,
    save_planner_of,
    unchanged_until_step,
    write,
)
from composer_checkpoint.stores.base import parse_uri
from composer_checkpoint.stores.databricks import EXPERIMENT_PLACEHOLDER, RUN_PLACEHOLDER
from composer_dist import dist
from composer_dist.progress import progress_recorder
from composer_events.arguments import check_counts, check_flags, check_names, check_places, check_seconds, to_interval
from composer_events.callback import Callback
from composer_events.event import Event
from composer_events.formatting import check_placeholders, format_name_with_dist
from composer_events.intervals import create_interval_scheduler
from composer_events.logger import Logger
from composer_events.state import State
from composer_time import Time, Timestamp

log = getLogger(__name__)

# A constant, since the lookup on the enum class runs Python code in Python 3.11, and it is needed after every batch.
_BATCH_CHECKPOINT: Final = Event.BATCH_CHECKPOINT
_FOLDER: Final = "{run_name}/checkpoints"
_NAME: Final = "ep{epoch}-ba{batch}-rank{rank}.pt"
_LATEST: Final = "latest-rank{rank}.pt"
_REMOTE_NAME: Final = f"{_FOLDER}/{_NAME}"
_REMOTE_POINTER: Final = f"{_FOLDER}/{_LATEST}"


class _Template:
    """Descriptor of a file name template: a `PartialFilePath` or `None`, which may also be set as a string."""

    def __init__(self, *, is_in_folder: bool = False) -> None:
        self._is_in_folder = is_in_folder

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = f"_{name}"

    def __get__(self, saver: Any, owner: type | None = None) -> Any:
        return self if saver is None else getattr(saver, self._attribute)

    def __set__(self, saver: Any, name: str | os.PathLike[str] | PartialFilePath | None) -> None:
        if name is not None and not isinstance(name, PartialFilePath):
            name = PartialFilePath(os.fspath(name).lstrip("/"), saver.folder if self._is_in_folder else None)
        setattr(saver, self._attribute, name)


class CheckpointSaver(Callback):
    """Save the training state at intervals and at the end of training, atomically.

    Each save writes the checkpoint under a temporary name, flushes and renames it; moves the link to the latest one;
    uploads it, if the folder is remote or a logger accepts files; and deletes checkpoints by the retention rules, in
    this order. One process saves to a folder at a time: the folder is locked during `fit`. At its start, leftovers of
    killed writers are removed, and a folder with checkpoints later than the run is refused.

    With `async_save`, training continues while a copy of the state is written. An error is raised at the end of the
    next batch, on all ranks; the end of training and the next save wait.

    Args:
        folder: The destination, with `{run_name}` and the placeholders of ranks; a path or an address such as
            `'s3://b/run'`. In it and in the names, `{mlflow_experiment_id}` and `{mlflow_run_id}` are filled in from
            the MLflow run of a logger, or else of the store.
        filename: The name of each checkpoint, with placeholders for run, ranks and time. Its suffix selects the format.
        remote_file_name: The name for loggers that accept files, or in the store, relative to the bucket. For a remote
            `folder` the default is `filename` below its path, or below `{run_name}/checkpoints` in a bare bucket.
            `None` uploads nothing, and requires a local folder.
        latest_filename: The name of the link to the latest checkpoint. `None` for no link.
        latest_remote_file_name: The name of the pointer, to which `.symlink` is added. The default is like that of
            `remote_file_name`.
        save_interval: How often to save: epochs, a timestring, a `Time`, or a function of the state and the event. A
            save at the end is added, unless it is 0, for never.
        overwrite: Whether a run may start in a folder with later checkpoints, and replace them.
        num_checkpoints_to_keep: How many of the newest stay on disk; -1 for all. 0 is for folders that are copied
            elsewhere.
        weights_only: Whether to save only the model and its metadata.
        ignore_keys: Patterns of entries to leave out, or a function that deletes from the checkpoint's dict.
        num_concurrent_uploads: How many files are uploaded at a time.
        upload_timeout_in_seconds: How long the end of training waits for uploads.
        async_save: Whether training continues while a checkpoint is written.
        save_async_policy: What a save does while the previous one is being written: `'wait'` for it, or `'skip'`.
        keep: Further retention rules; see `RetentionPolicy.from_setting`. With the key `remote`, checkpoints are
            deleted from the store too: `True` for the same rules, or rules of its own, as in
            `{'last': 1, 'remote': {'last': 3, 'every': '10ep'}}`.
        save_timeout_in_seconds: How long any rank's disk or store may take for its part of a checkpoint. After that, or
            if a rank does not begin to save within three times that, all ranks raise an error that names it. `None`
            waits without limit.
        remote_num_checkpoints_to_keep: How many of the newest stay in the store; -1 for all. Checkpoints of other runs
            are never deleted there, and none is deleted before a later one is complete in the store.

    Attributes:
        saved_checkpoints: The paths that this process has saved and not deleted, oldest first; the addresses if
            `folder` is one.
        all_saved_checkpoints_to_timestamp: The time in training of each saved path, also from before a resume.
        last_checkpoint_batch: The batch of the latest save.
        resumes: Whether the run resumes from a checkpoint that `checkpoint_to_resume`, which sets this, has found.
            Later checkpoints are then damaged or abandoned, and may be replaced.
        before_save: Called before each save, on every rank. If it raises, the checkpoint is not written.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If names, intervals or numbers cannot be used, or contradict each other.
        CompressorNotFound: If the program that the file name needs is not installed.

    Example:
        >>> import torch
        >>> from composer_events import Engine, Event, State
        >>> folder = tempfile.mkdtemp()
        >>> saver = CheckpointSaver(folder, "ba{batch}.pt", save_interval="1ba")
        >>> layer = torch.nn.Linear(2, 1)
        >>> state = State(layer, 1, "plum", "cpu", max_duration="2ba", dataloader=[0, 1], callbacks=saver)
        >>> engine = Engine(state)
        >>> for event in (Event.INIT, Event.FIT_START):
        ...     _ = engine.run_event(event)
        >>> for _ in state.dataloader:
        ...     state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=1)
        ...     _ = engine.run_event(Event.BATCH_CHECKPOINT)
        >>> _ = engine.run_event(Event.FIT_END)
        >>> [path.rpartition("/")[2] for path in saver.saved_checkpoints]
        ['ba1.pt', 'ba2.pt']
        >>> engine.close()
    """

    saves_checkpoints = True
    filename: _Template = _Template(is_in_folder=True)
    latest_filename: _Template = _Template(is_in_folder=True)
    remote_file_name: _Template = _Template()
    latest_remote_file_name: _Template = _Template()

    def __init__(
        self,
        folder: str = _FOLDER,
        filename: str = _NAME,
        remote_file_name: str | None = _REMOTE_NAME,
        latest_filename: str | None = _LATEST,
        latest_remote_file_name: str | None = _REMOTE_POINTER,
        save_interval: "Time[Any] | str | int | Callable[[State, Event], bool]" = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys | None = None,
        num_concurrent_uploads: int = 1,
        upload_timeout_in_seconds: int = 3600,
        async_save: bool = False,
        save_async_policy: Literal["wait", "skip"] = "wait",
        keep: Any = None,
        save_timeout_in_seconds: float | None = 1800,
        remote_num_checkpoints_to_keep: int = -1,
    ) -> None:
        check_places(folder=folder, filename=filename)
        remote_names = {"remote_file_name": remote_file_name, "latest_remote_file_name": latest_remote_file_name}
        check_names(_REMOTE_NAME, **remote_names)
        check_placeholders(OF_FOLDER, folder=folder)
        check_placeholders(OF_SAVE, **remote_names)
        check_flags(may_be_none=True, overwrite=overwrite, weights_only=weights_only, async_save=async_save)
        check_counts(num_concurrent_uploads=num_concurrent_uploads)
        check_counts(-1, remote_num_checkpoints_to_keep=remote_num_checkpoints_to_keep)
        check_seconds(upload_timeout_in_seconds=upload_timeout_in_seconds)
        check_seconds(may_be_none=True, save_timeout_in_seconds=save_timeout_in_seconds)
        check_ignore_keys("save_ignore_keys", ignore_keys)
        if save_async_policy not in ("wait", "skip"):
            raise ValueError(f"save_async_policy={save_async_policy!r} is not known. Use 'wait' or 'skip'.")
        folder, filename = os.fspath(folder), os.fspath(filename).lstrip("/")
        interval = to_interval("save_interval", save_interval)
        check_filename(filename, interval=interval if isinstance(interval, Time) else None, overwrite=overwrite)
        check_compressor(filename)
        if latest_filename is not None:
            check_places(latest_filename=latest_filename)
            check_filename(str(latest_filename), argument="save_latest_filename", overwrite=True)
            if str(latest_filename).lstrip("/") == filename:
                raise ValueError(
                    f"save_latest_filename={latest_filename!r} is also the name of the checkpoints, so the link to the "
                    f"latest one would replace it. Give them different names, or pass save_latest_filename=None."
                )
        self.save_timeout_in_seconds = save_timeout_in_seconds
        self._kept = KeptFiles(combine_policies(num_checkpoints_to_keep, keep))
        remote_rules, said = remote_policy(remote_num_checkpoints_to_keep, keep, self._kept.policy)
        self.save_interval: Callable[[State, Event], bool] = (
            create_interval_scheduler(interval) if isinstance(interval, Time) else interval
        )
        self.overwrite = bool(overwrite)
        self.num_checkpoints_to_keep = num_checkpoints_to_keep
        self.weights_only = bool(weights_only)
        self.ignore_keys = ignore_keys
        self.async_save = bool(async_save)
        self.save_async_policy: Literal["wait", "skip"] = save_async_policy

        self.remote_uploader: RemoteUploader | None = None
        self._remove_temporary: Callable[[], object] | None = None
        self._remote_folder = folder if parse_uri(folder).backend else None
        if self._remote_folder is not None:
            if remote_file_name is None:
                raise ValueError(
                    f"remote_file_name=None uploads nothing, so folder={folder!r} would get no checkpoint. Leave "
                    "remote_file_name out, or give a folder on a disk."
                )
            self.remote_uploader = RemoteUploader(folder, num_concurrent_uploads=num_concurrent_uploads)
            # In a bare bucket, names begin with the run, so that the checkpoints of several runs do not mix.
            inside = parse_uri(folder).path.strip("/") or _FOLDER
            if remote_file_name == _REMOTE_NAME:
                remote_file_name = f"{inside}/{filename}"
            if latest_remote_file_name == _REMOTE_POINTER:
                latest_remote_file_name = f"{inside}/{os.fspath(latest_filename or _LATEST).lstrip('/')}"
            # Files are written here before they are uploaded.
            folder = tempfile.mkdtemp(prefix="composer-save-")
            # Also runs when the saver is deleted, or Python exits, without `post_close`.
            self._remove_temporary = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._kept_remotely = None if remote_rules is None else KeptRemotely(remote_rules, said, self.remote_uploader)
        self._uploads = CheckpointUploads(
            self.remote_uploader, self.overwrite, upload_timeout_in_seconds, self._kept_remotely
        )
        self.folder = folder  # before the templates, which use it
        self.filename, self.latest_filename = filename, latest_filename
        self.remote_file_name, self.latest_remote_file_name = remote_file_name, latest_remote_file_name

        self._addresses: dict[str, str] = {}  # by name in the bucket, oldest first
        self.all_saved_checkpoints_to_timestamp: dict[str, Timestamp] = {}
        self._saving: Save | None = None
        self._lineage: str | None = None
        self._loaded: Mapping[str, Any] = {}
        self.last_checkpoint_batch: Time[int] | None = None
        # A function as interval decides by itself whether to save at the end.
        self._saves_at_end = isinstance(interval, Time) and interval.value > 0
        self._holds_stop = False  # whether the latest checkpoint records that training was stopped
        self.rank_saves_symlinks = False
        self.resumes = False
        self.before_save: Callable[[], object] | None = None
        self._async: AsyncSaver | None = None
        self._committed: list[Save] = []
        self._measured = MetricHistory()

    @property
    def folder(self) -> str:
        """Return the folder that checkpoints are written to."""
        return self._folder.name

    @folder.setter
    def folder(self, folder: str) -> None:
        self._folder = HeldFolder(os.fspath(folder))
        # The templates contain the folder, so they are set again.
        for name in ("filename", "latest_filename"):
            if (path := getattr(self, name, None)) is not None:
                setattr(self, name, path.filename)

    @property
    def saved_checkpoints(self) -> list[str]:
        """Return the paths, or the addresses in a store, that this process has saved and not deleted, oldest first."""
        if self._remote_folder is None or self.remote_file_name is None:
            return self._kept.names
        gone = self._kept_remotely
        return [address for name, address in self._addresses.items() if gone is None or not gone.has_deleted(name)]

    @saved_checkpoints.setter
    def saved_checkpoints(self, paths: list[str]) -> None:
        if self._remote_folder is None or self.remote_file_name is None:
            self._kept.names = paths
        else:
            self._addresses = {parse_uri(address).path: address for address in paths}

    def init(self, state: "State", logger: "Logger") -> None:
        """Fill in the MLflow run in names with its placeholders, and check that the store can be written to."""
        self._name_mlflow_run(logger)
        if self.remote_uploader is not None:
            Ranks().together(self.remote_uploader.init)

    def fit_start(self, state: "State", logger: "Logger") -> None:
        """Lock the folder for this process, and refuse a folder with later checkpoints than the time of the run."""
        # Only now does the state have the metrics, whose class tells whether larger values are better.
        for kept in (self._kept, self._kept_remotely):
            if kept is not None:
                kept.policy = kept.policy.with_mode(metric_of(state, kept.policy.metric))
        path_of(state, self.filename.filename, self.filename.folder)  # raises if the name is invalid
        self._holds_stop = False
        if self.last_checkpoint_batch is not None and state.timestamp.batch < self.last_checkpoint_batch:
            self.last_checkpoint_batch = None  # the time was set back, so that this batch will be reached again
        template, remote_template = (template_of_run(state, name) for name in (self.filename, self.remote_file_name))
        folder = format_name_with_dist(self.folder, state.run_name)
        # Only now, when the folder and the names of this run are known.
        loaded, self._loaded = self._loaded, {}
        if loaded.get("kept"):
            self._kept.adopt(loaded["kept"], folder, template or "", state.run_name)
        if self._kept_remotely is not None and remote_template is not None and loaded.get("kept_remotely"):
            self._kept_remotely.adopt(loaded["kept_remotely"], remote_template)
        # After a resume, later checkpoints are those that `checkpoint_to_resume` has skipped, so they do not conflict.
        may_replace = self._uploads.overwrite = self.overwrite or self.resumes
        store = None if self.remote_uploader is None or may_replace else self.remote_uploader.remote_backend
        later = () if may_replace else (template, remote_template)
        self._folder.take(state, *later, link=self.latest_filename, store=store)

    def batch_checkpoint(self, state: "State", logger: "Logger") -> None:
        """Save if it is due."""
        self._save_if_due(_BATCH_CHECKPOINT, state, logger)

    def epoch_checkpoint(self, state: "State", logger: "Logger") -> None:
        """Save if it is due."""
        self._save_if_due(Event.EPOCH_CHECKPOINT, state, logger)

    def iteration_checkpoint(self, state: "State", logger: "Logger") -> None:
        """Save if it is due."""
        self._save_if_due(Event.ITERATION_CHECKPOINT, state, logger)

    def after_train_batch(self, state: "State", logger: "Logger") -> None:
        """Wait until the weights have been copied, before the optimizer's step changes them."""
        if self._async is not None:
            self._async.wait_for_staging()

    def batch_end(self, state: "State", logger: "Logger") -> None:
        """Raise errors of saves and uploads in the background."""
        if not (self._async or self._committed or self._uploads.are_watched or self._kept_remotely):
            return  # without communication between ranks, as after most batches
        if self._async is not None:
            self._async.check()
        self._finish_committed(logger)
        self._uploads.check(more_to_come=self._async is not None and self._async.is_saving)

    def eval_end(self, state: "State", logger: "Logger") -> None:
        """Record the metrics by which the best checkpoints are kept."""
        if ranked_by := self._ranked_by():
            self._measured.note(state, ranked_by if self._folder.is_held else set())

    def fit_end(self, state: "State", logger: "Logger") -> None:
        """Save once more if training was stopped after the latest save, wait for all saves, and unlock the folder."""
        try:
            if self._misses_stop(state):
                self._save_checkpoint(state, logger)
            self.wait(state, logger)
        finally:
            # Also after an error, so that another `fit` or process can save to the folder.
            self._folder.give_back()

    def wait(self, state: "State", logger: "Logger") -> None:
        """Wait until everything is saved and uploaded. Every rank must call this.

        Raises:
            CheckpointError: On all ranks, if a save failed on any.
            RuntimeError: If uploads take longer than `upload_timeout_in_seconds`.
        """
        if self._async is not None:
            self._async.wait()
        self._finish_committed(logger)
        self._uploads.wait()
        self._kept.rotate()  # again: files are kept while they are being uploaded

    def close(self, state: "State", logger: "Logger") -> None:
        """Finish saves in progress without other ranks, which may be gone."""
        try:
            if self._async is not None:
                self._async.drain()
                self._async.close()
                self._async = None
            self._finish_committed(logger)
        finally:
            self._folder.give_back()

    def post_close(self) -> None:
        """Wait for uploads, and release connections and temporary files."""
        try:
            self._uploads.close()
            self._kept.rotate()
        finally:
            if self._remove_temporary is not None:
                self._remove_temporary()

    def save(self, state: "State", logger: "Logger") -> None:
        """Save immediately. Every rank must call this."""
        if self._folder.is_held:
            self._save_checkpoint(state, logger)
            return
        # Outside of `fit`, the folder is locked for this save only.
        self._folder.take(state)
        try:
            self._save_checkpoint(state, logger)
            self.wait(state, logger)
        finally:
            self._folder.give_back()

    def state_dict(self) -> dict[str, Any]:
        """Return the list of checkpoints, including those from before a resume and the one that is being saved."""
        times = self.all_saved_checkpoints_to_timestamp
        state = {
            "all_saved_checkpoints_to_timestamp": [(name, time.state_dict()) for name, time in times.items()],
            "kept": self._kept.entries(),
            LINEAGE_KEY: self._lineage,
        }
        job = self._saving
        # Listed in its own content, so that a run that resumes from it can delete it later.
        if job is not None:
            state["kept"].append((own_file(job.path), job.timestamp.state_dict(), job.metrics))
        if self._kept_remotely is not None:
            state["kept_remotely"] = self._kept_remotely.state_dict()
            if job is not None and job.remote_name is not None:
                entry = own_file(job.remote_name), job.timestamp.state_dict(), job.metrics
                state["kept_remotely"]["saved"].append(entry)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the list of checkpoints."""
        self.all_saved_checkpoints_to_timestamp = {}
        for name, saved in state.get("all_saved_checkpoints_to_timestamp", ()):
            timestamp = self.all_saved_checkpoints_to_timestamp[name] = Timestamp()
            timestamp.load_state_dict(saved)
        if self.resumes:  # any other load begins a new lineage
            self._lineage = state.get(LINEAGE_KEY)
        self._loaded = state  # adopted in `fit_start`

    def _name_mlflow_run(self, logger: "Logger") -> None:
        """Fill in the MLflow experiment and run: those of a logger, or else those that rank 0 begins."""
        attributes = ("filename", "latest_filename", "remote_file_name", "latest_remote_file_name")
        names = {name: path.filename for name in attributes if (path := getattr(self, name)) is not None}
        if not any("{mlflow_" in template for template in (self.folder, self._remote_folder or "", *names.values())):
            return
        uploader = self.remote_uploader
        for destination in getattr(logger, "destinations", ()):
            ids: Any = [getattr(destination, name, None) for name in ("experiment_id", "run_id")]
            if all(isinstance(one, str) for one in ids):
                break
        else:
            ids = None if uploader is None else uploader.begin_mlflow_run()
        if ids is None:
            return

        def fill(template: str) -> str:
            return template.replace(EXPERIMENT_PLACEHOLDER, ids[0]).replace(RUN_PLACEHOLDER, ids[1])

        self.folder = fill(self.folder)
        for name, template in names.items():
            setattr(self, name, fill(template))
        if uploader is not None and self._remote_folder is not None:
            uploader.remote_folder = self._remote_folder = fill(self._remote_folder)

    def is_save_due(self, state: "State", event: Event) -> bool:
        """Return whether a save is due: by the interval, or because training was stopped after the latest save."""
        return self.save_interval(state, event) or self._misses_stop(state)

    def _save_if_due(self, event: Event, state: "State", logger: "Logger") -> None:
        if not self.is_save_due(state, event):
            return
        # The events of a batch, an epoch and an iteration may follow the same batch, and need one checkpoint.
        if self.last_checkpoint_batch != state.timestamp.batch or self._misses_stop(state):
            self.save(state, logger)

    def _misses_stop(self, state: "State") -> bool:
        """Return whether training was stopped early and no checkpoint records it, so that a resume would train on."""
        if state.stopped_duration is None or state.previous_timestamp is None or self._holds_stop or self.weights_only:
            return False
        return self._saves_at_end or self.last_checkpoint_batch is not None

    def _save_checkpoint(self, state: "State", logger: "Logger") -> None:
        """Save now. Composer's name, which LLM-Shearing calls."""
        layout = layout_of(state)
        if self._async is not None and self._skips(state):
            log.warning("The checkpoint at batch %s is skipped: the last one is being written.", state.timestamp.batch)
            return
        if self.before_save is not None:  # before anything is recorded, since it may raise
            self.before_save()
        if self._async is not None:  # so that this checkpoint lists the previous one
            self._async.wait()
            self._finish_committed(logger)
        if self._misses_stop(state) and self.last_checkpoint_batch == state.timestamp.batch:
            self._uploads.overwrite = True  # the checkpoint from before the stop may have the same name
        # A checkpoint records the stop only if all ranks have stopped by now.
        self._holds_stop = Ranks().all(state.stopped_duration is not None)
        if self._lineage is None:
            drawn = [uuid.uuid4().hex]  # each rank draws another one, so rank 0's is used
            dist.broadcast_object_list(drawn, src=0)
            self._lineage = drawn[0]
        job = self._name_save(state)
        # Rank 0 alone deletes and links shared checkpoints; each rank does so for its own per-rank files.
        self._kept.deletes = self.rank_saves_symlinks = layout is Layout.LOCAL or Ranks().rank == 0
        self.last_checkpoint_batch = state.timestamp.batch
        # Recorded before the content is collected, since the content includes this record.
        self.all_saved_checkpoints_to_timestamp[own_file(job.address or job.path)] = job.timestamp
        self._saving = job
        self._uploads.are_watched |= job.remote_name is not None
        try:
            content = collect(state, weights_only=self.weights_only, ignore_keys=self.ignore_keys)
        finally:
            self._saving = None
        info = {**describe(state, weights_only=self.weights_only), LINEAGE_KEY: self._lineage}
        if self.async_save:
            self._save_in_background(state, content, job, layout, info)
            return
        planner = save_planner_of(state)
        if write(content, job.path, layout, info, self.save_timeout_in_seconds, planner) is not None:
            self._commit(job)
        self._finish_committed(logger)
        self._uploads.check()

    def _skips(self, state: "State") -> bool:
        assert self._async is not None
        self._async.check()
        elapsed = state.get_elapsed_duration()
        # The last save is never skipped, since no later one would replace it.
        is_last = elapsed is not None and float(elapsed) >= 1.0
        return self.save_async_policy == "skip" and self._async.is_saving and not is_last

    def _name_save(self, state: "State") -> Save:
        filename, remote = self.filename, self.remote_file_name
        path, address = path_of(state, filename.filename, filename.folder), None
        remote_name = None
        if remote is not None:
            template = within_folder(state, remote.filename)
            if layout_of(state) is Layout.LOCAL:
                # Doubled, so that formatting leaves `{rank}` in the name, which all ranks then share.
                template = template.replace("{rank}", "{{rank}}")
            remote_name = PartialFilePath(template).format(state)
        if self._remote_folder is not None and remote_name is not None:
            # `netloc`, since `parse_uri` cuts it at the `@` of `bucket@namespace` or `user@host`.
            place, root = urlsplit(self._remote_folder), "/" if parse_uri(self._remote_folder).path[:1] == "/" else ""
            address = f"{place.scheme}://{place.netloc}/{root}{remote_name}"
            path = address if layout_of(state) is Layout.SHARDED else path  # each rank writes there directly
        # Without a link if no checkpoint is kept, since it would dangle after the deletion.
        link = None if self._kept.policy.keeps_none else self.latest_filename
        pointer = self.latest_remote_file_name
        return Save(
            path=path,
            address=address,
            timestamp=state.timestamp,
            metrics=self._measured.by_now(state, self._ranked_by()),
            link=None if link is None else link.format(state),
            remote_name=remote_name,
            remote_pointer=None if pointer is None else pointer.format(state),
        )

    def _ranked_by(self) -> set[str]:
        places = (self._kept, self._kept_remotely)
        return {place.policy.metric for place in places if place is not None and place.policy.metric is not None}

    def _save_in_background(
        self, state: "State", content: dict[str, Any], job: Save, layout: Layout, info: dict[str, Any]
    ) -> None:
        if self._async is None:
            # `_skips` has already applied the 'skip' policy.
            self._async = AsyncSaver(policy="wait", timeout_s=self.save_timeout_in_seconds)
        writes = layout is not Layout.MONOLITHIC or Ranks().rank == 0
        self._async.save(
            content,
            job.path,
            sharded=layout is Layout.SHARDED,
            local=layout is Layout.LOCAL,
            info=info,
            # Conflicts were refused when the folder was locked.
            overwrite=True,
            stable_until_step=unchanged_until_step(state),
            then=(lambda: self._commit(job)) if writes else None,
            planner=save_planner_of(state),
        )

    def _commit(self, job: Save) -> None:
        """Move the link to a written checkpoint. In asynchronous saves the background thread calls this."""
        if self.rank_saves_symlinks and job.link is not None and not parse_uri(job.path).backend:
            replace_pointer(job.link, own_file(job.path))
        self._committed.append(job)
        if (recorder := progress_recorder()) is not None:
            recorder.note_checkpoint(job.timestamp.num_batches)

    def _finish_committed(self, logger: "Logger") -> None:
        while self._committed:  # the background thread may append to it
            job = self._committed.pop(0)
            # The rank that deletes the files also uploads them, so that it knows when they are no longer read.
            upload = self._uploads.send(job, logger) if self._kept.deletes else None
            self._kept.add(own_file(job.path), job.timestamp, job.metrics, upload)
            if job.address is not None and job.remote_name is not None:
                self._addresses.pop(own_file(job.remote_name), None)  # re-inserted as the newest
                self._addresses[own_file(job.remote_name)] = own_file(job.address)
            self._kept.rotate()
        if self._kept_remotely is not None:
            self._kept_remotely.rotate()
