"""Background uploads to object stores."""

import logging
import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from composer_checkpoint.remote.publish import publish_checkpoint, upload_with_retries, write_pointer
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError
from composer_checkpoint.stores.databricks import MLFlowObjectStore
from composer_checkpoint.stores.opening import open_store, probe_name, validate_credentials
from composer_dist.env import get_global_rank, get_local_rank
from composer_dist.progress import progress_recorder
from composer_events.arguments import check_counts


class RemoteFilesExistingCheckStatus(IntEnum):
    """Outcome of waiting for remote files."""

    EXIST = 1
    TIMEOUT = 2
    ERROR = 3


log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_LOOK_AGAIN_S = 1.0
_POLL_S = 2.0
_STAGGER_VARIABLE = "COMPOSER_LOCAL_RANK_STAGGER_SECONDS"


class RemoteUploader:
    """Upload files to a store in the background.

    Uploads of one name run in the order of the calls. Transient errors are retried. A permanent error is raised by the
    next `check_workers`, `wait` or `wait_and_close`, with the store's own error as its cause. The environment variable
    `COMPOSER_LOCAL_RANK_STAGGER_SECONDS`, times the local rank, delays each upload.

    Args:
        remote_folder: An address such as `'s3://bucket/folder'`. Names of files are relative to the bucket.
        backend_kwargs: Additional arguments of the store.
        num_concurrent_uploads: Number of simultaneous uploads.
        num_attempts: Number of attempts per file.
        use_procs: Whether to upload in separate processes, for stores whose client holds the GIL. Otherwise threads
            are as fast, and start at once.
        staging_folder: Folder for copies of files; a temporary folder when `None`.

    Raises:
        ValueError: If a count is less than 1, or the address is a local path or malformed.
        NotImplementedError: If no store supports this kind of address.

    Example:
        >>> import tempfile
        >>> uploader = RemoteUploader("memory://docs")
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     future = uploader.upload_file_async("run/notes.txt", file.name, overwrite=True)
        >>> uploader.wait_and_close()
        >>> future.result()
    """

    def __init__(
        self,
        remote_folder: str,
        backend_kwargs: dict[str, Any] | None = None,
        num_concurrent_uploads: int = 2,
        num_attempts: int = 3,
        *,
        use_procs: bool = False,
        staging_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        check_counts(num_concurrent_uploads=num_concurrent_uploads, num_attempts=num_attempts)
        self._stagger_s = _read_stagger()
        self.remote_folder, self.backend_kwargs = remote_folder, dict(backend_kwargs or {})
        self.num_concurrent_uploads, self.num_attempts, self.use_procs = num_concurrent_uploads, num_attempts, use_procs
        self.futures: list[Future[Any]] = []
        self._latest_of: dict[str, Future[Any]] = {}
        self._store: ObjectStore | None = None
        # Not opened yet if it has placeholders of an MLflow run, since opening it may create the run on each rank.
        if "{mlflow_" not in remote_folder:
            self._store = open_store(remote_folder, self.backend_kwargs)
        self._threads: Executor | None = None
        self._processes: Executor | None = None
        self._staging_folder = staging_folder
        self._copies: tempfile.TemporaryDirectory[str] | None = None
        self._num_copies = 0
        self._unsent: dict[str, _Unsent] = {}
        self._lock = threading.Lock()
        self._closing, self._has_failed = threading.Event(), threading.Event()

    @property
    def remote_backend(self) -> ObjectStore:
        """Object store of `remote_folder`.

        If `remote_folder` has placeholders of an MLflow run, it is opened on first use. After `wait_and_close`, it is
        reopened on next use.
        """
        if self._store is None:
            self._store = open_store(self.remote_folder, self.backend_kwargs)
        return self._store

    def init(self) -> None:
        """Validate on rank 0, before training starts, that the store accepts uploads.

        Raises:
            StorageError: If it does not.
        """
        if get_global_rank() == 0:
            validate_credentials(self.remote_backend, probe_name(self.remote_folder))

    def upload_file_async(
        self, remote_file_name: str, file_path: str | os.PathLike[str], overwrite: bool, *, copy: bool = True
    ) -> Future[None]:
        """Start to upload a file in the background.

        Args:
            remote_file_name: Name of the object in the bucket.
            file_path: Local file.
            overwrite: Whether to replace an object of the same name.
            copy: Whether to copy the file first, so that it may be changed or deleted at once. Otherwise it must not
                change until the future is done.

        Returns:
            A future that holds the upload's error, if any.
        """
        if not copy:
            return self.run_async(remote_file_name, lambda: self._upload(remote_file_name, Path(file_path), overwrite))
        unsent = _Unsent(self._copy(file_path), overwrite)
        return self.run_async(remote_file_name, lambda: self._send(remote_file_name, unsent))

    def upload_newest_async(
        self, remote_file_name: str, file_path: str | os.PathLike[str], overwrite: bool
    ) -> Future[None]:
        """Start to upload a file in the background, replacing a queued upload of the same name.

        Use it for files that are rewritten faster than the store accepts them.

        Args:
            remote_file_name: Name of the object in the bucket.
            file_path: Local file. It is copied first, so that it may be changed or deleted at once.
            overwrite: Whether to replace an object of the same name.

        Returns:
            As `upload_file_async`.

        Raises:
            FileExistsError: If an upload of this name is queued or running and `overwrite` is false.
        """
        with self._lock:
            unsent = self._unsent.get(remote_file_name)
            # Successful uploads are removed, so this one has failed; `check_workers` or `wait` raises its error.
            if unsent is not None and unsent.future.done():
                unsent = None
            if unsent is not None and not overwrite:
                raise FileExistsError(
                    f"Object {remote_file_name} was already enqueued to be uploaded, but overwrite=False. Choose "
                    f"another name, or pass overwrite=True."
                )
            source = self._copy(file_path)
            # Replacing the copy in the queue keeps the disk and the network from falling behind fast writers.
            if unsent is not None and not unsent.has_begun:
                unsent.source.unlink()
                # If the first upload may not overwrite, an object from before it must still be rejected.
                unsent.source, unsent.overwrite = source, unsent.overwrite and overwrite
                return unsent.future
            unsent = self._unsent[remote_file_name] = _Unsent(source, overwrite)
            unsent.future = self.run_async(remote_file_name, lambda: self._send(remote_file_name, unsent))
            return unsent.future

    @property
    def has_failed(self) -> bool:
        """Return whether any upload has failed after all attempts."""
        return self._has_failed.is_set()

    @property
    def unsent_names(self) -> list[str]:
        """Names of the uploads of `upload_newest_async` that are queued or running, or have failed."""
        with self._lock:
            return list(self._unsent)

    def publish_async(
        self, path: str | os.PathLike[str], remote_name: str, *, pointer: str | None = None, overwrite: bool = False
    ) -> Future[None]:
        """Start to upload a committed checkpoint with `publish_checkpoint` in the background.

        Checkpoints for one pointer are uploaded in the order of the calls, so that the pointer never moves back. The
        file or folder must not change until the future is done.

        Args:
            path: A file or a folder.
            remote_name: Its name in the bucket.
            pointer: Name of the pointer without its suffix `.symlink`.
            overwrite: Whether to replace a complete checkpoint of this name.
        """

        def publish() -> None:
            publish_checkpoint(
                path,
                self.remote_backend,
                remote_name,
                pointer=pointer,
                overwrite=overwrite,
                num_attempts=self.num_attempts,
                num_concurrent_uploads=self.num_concurrent_uploads,
            )

        return self.run_async(pointer or remote_name, publish)

    def begin_mlflow_run(self) -> tuple[str, str] | None:
        """Return the MLflow experiment and run that rank 0 begins; `None` for other stores. Every rank must call this.

        Only rank 0 opens a store whose address has placeholders of a run, since that may create a run.
        """
        if "{mlflow_" not in str(self.backend_kwargs.get("path", self.remote_folder)):
            return None
        from composer_checkpoint._ranks import Ranks  # imports torch, which is slow

        def begin() -> tuple[str, str] | None:
            store = self.remote_backend
            return (store.experiment_id, store.run_id) if isinstance(store, MLFlowObjectStore) else None

        return Ranks().from_first(begin)

    def point_async(self, pointer: str, target: str, names: Sequence[str], *, timeout_s: float = 3600) -> Future[None]:
        """Start to wait in the background for objects to exist, then write a pointer to them.

        Args:
            pointer: Full name of the pointer, including the suffix `.symlink`. An existing one is replaced.
            target: Name that the pointer holds: an object, or the prefix of several.
            names: Names of the objects, uploaded by any rank.
            timeout_s: Maximum wait in seconds.
        """

        def point() -> None:
            status = self.check_remote_files_exist_async(names, timeout_s, _LOOK_AGAIN_S).result()
            if status is not RemoteFilesExistingCheckStatus.EXIST:
                raise RuntimeError(
                    f"{self.remote_backend.get_uri(pointer)} was not written, since not all of {list(names)} arrived "
                    f"({status.name} after at most {timeout_s} s). Check the logs of the other ranks."
                )
            write_pointer(self.remote_backend, pointer, target, num_attempts=self.num_attempts)

        return self.run_async(pointer, point)

    def check_workers(self) -> None:
        """Raise the first error of the uploads that are done, and forget them."""
        ended = [future for future in self.futures if future.done()]
        self.futures = [future for future in self.futures if future not in ended]
        _raise_first(ended)

    def wait(self) -> None:
        """Wait for all uploads, forget them, and raise the first error."""
        waiting, self.futures = self.futures, []
        for future in waiting:
            while not future.done():
                wait([future], timeout=_POLL_S)
                if (recorder := progress_recorder()) is not None:
                    recorder.note_progress()  # the launcher must not end the run before the uploads
            future.exception()  # does not raise it, so that all uploads end first
        _raise_first(waiting)

    def wait_and_close(self) -> None:
        """Wait for all uploads, release all resources, and raise the first error.

        Threads, processes, copies and connections are released. The uploader can be used again afterwards.
        """
        try:
            self.wait()
        finally:
            self._close()

    def abandon(self) -> None:
        """Cancel queued uploads, wait for running ones, and release all resources without raising."""
        self._close(cancel=True)
        self.futures.clear()

    def check_remote_files_exist_async(
        self,
        remote_checkpoint_file_names: Sequence[str],
        max_wait_time_in_seconds: float = 3600,
        wait_before_next_try_in_seconds: float = 30,
    ) -> Future[RemoteFilesExistingCheckStatus]:
        """Start to wait in the background for objects to exist, such as those that other ranks upload.

        Args:
            remote_checkpoint_file_names: Names of the objects in the bucket.
            max_wait_time_in_seconds: Maximum wait.
            wait_before_next_try_in_seconds: Wait between two looks at a missing object.

        Returns:
            A future with `EXIST`, `TIMEOUT`, or `ERROR` if an upload of this uploader failed or it was closed.
        """
        answer: Future[RemoteFilesExistingCheckStatus] = Future()
        store, missing = self.remote_backend, list(remote_checkpoint_file_names)
        deadline = time.monotonic() + max_wait_time_in_seconds

        def look() -> RemoteFilesExistingCheckStatus:
            while missing:
                with suppress(FileNotFoundError, ObjectStoreTransientError):
                    store.get_object_size(missing[0])
                    missing.pop(0)  # never looked up again: an object that was seen stays
                    continue
                # Checked after the lookup, since the objects may exist although another upload failed.
                if self._has_failed.is_set() or self._closing.is_set():
                    return RemoteFilesExistingCheckStatus.ERROR
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return RemoteFilesExistingCheckStatus.TIMEOUT
                self._closing.wait(min(wait_before_next_try_in_seconds, left_s))
            return RemoteFilesExistingCheckStatus.EXIST

        def watch() -> None:
            try:
                answer.set_result(look())
            except Exception as error:  # raised by the future's `result`
                answer.set_exception(error)

        # A daemon, so that waiting does not keep the process alive.
        threading.Thread(target=watch, name="remote-files", daemon=True).start()
        return answer

    def run_async(self, name: str, work: Callable[[], _Result]) -> Future[_Result]:
        """Start a function in an upload thread, after all earlier work for the object of this name."""
        if self._threads is None:
            self._closing.clear()  # set if the uploader was closed before
            self._threads = ThreadPoolExecutor(self.num_concurrent_uploads, thread_name_prefix="upload")
        before = self._latest_of.get(name)  # work for one name must not overlap or change its order

        def run() -> _Result:
            if before is not None:
                before.exception()  # cannot deadlock: the queue is in order, so it has started already
            if self._stagger_s:
                time.sleep(self._stagger_s)
            try:
                return work()
            except BaseException:
                self._has_failed.set()
                raise

        future = self._threads.submit(run)
        self._latest_of[name] = future
        self.futures.append(future)
        return future

    def _send(self, name: str, unsent: "_Unsent") -> None:
        with self._lock:  # from here on, a newer file gets an upload of its own
            unsent.has_begun = True
        try:
            self._upload(name, unsent.source, unsent.overwrite)
        finally:
            unsent.source.unlink(missing_ok=True)
        with self._lock:
            if self._unsent.get(name) is unsent:  # not if a newer upload has replaced it
                del self._unsent[name]

    def _upload(self, name: str, source: Path, overwrite: bool) -> None:
        if not self.use_procs:
            upload_with_retries(self.remote_backend, name, source, overwrite=overwrite, num_attempts=self.num_attempts)
            return
        if self._processes is None:
            # Spawned, since a forked process would share the connections of this one.
            context = multiprocessing.get_context("spawn")
            self._processes = ProcessPoolExecutor(self.num_concurrent_uploads, mp_context=context)
        # As bytes, since `_store` caches by its argument, and a dict is not hashable.
        settings = pickle.dumps((self.remote_folder, self.backend_kwargs))
        self._processes.submit(_upload_in_process, settings, name, source, overwrite, self.num_attempts).result()

    def _copy(self, file_path: str | os.PathLike[str]) -> Path:
        if self._copies is None:
            if self._staging_folder is not None:
                os.makedirs(self._staging_folder, exist_ok=True)
            self._copies = tempfile.TemporaryDirectory(prefix="composer-upload-", dir=self._staging_folder)
        self._num_copies += 1
        return Path(shutil.copyfile(file_path, Path(self._copies.name) / str(self._num_copies)))

    def _close(self, *, cancel: bool = False) -> None:
        self._closing.set()
        # Threads first, since they submit work to the processes.
        for executor in (self._threads, self._processes):
            if executor is not None:
                executor.shutdown(cancel_futures=cancel)
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.cleanup()  # only now, since the uploads above still read them
        if self._store is not None:
            self._store.close()
        self._threads = self._processes = self._store = None
        self._latest_of.clear()
        self._unsent.clear()
        self._has_failed.clear()


@dataclass(slots=True, eq=False)
class _Unsent:
    """Copy of a file that is queued or being uploaded."""

    source: Path
    overwrite: bool
    has_begun: bool = False
    future: Future[None] = field(default_factory=Future)


def _read_stagger() -> float:
    text = os.environ.get(_STAGGER_VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{_STAGGER_VARIABLE}={text!r} is not a number of seconds. Set it to one from 0, or unset it.")
    return seconds * get_local_rank() if seconds else 0.0


def _raise_first(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        error = future.exception()
        if error is not None:
            raise error


def _upload_in_process(settings: bytes, name: str, source: Path, overwrite: bool, num_attempts: int) -> None:
    upload_with_retries(_store(settings), name, source, overwrite=overwrite, num_attempts=num_attempts)


@cache  # one store, and so one set of connections, per process
def _store(settings: bytes) -> ObjectStore:
    return open_store(*pickle.loads(settings))
