"""Uploads that run while training goes on."""

import logging
import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from composer_checkpoint.remote.publish import publish_checkpoint, upload_with_retries, write_pointer
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, parse_uri
from composer_checkpoint.stores.opening import open_store, validate_credentials
from composer_dist.env import get_global_rank, get_local_rank
from composer_events.arguments import check_counts

__all__ = ["RemoteFilesExistingCheckStatus", "RemoteUploader"]


class RemoteFilesExistingCheckStatus(IntEnum):
    """How waiting for remote files ended."""

    EXIST = 1
    TIMEOUT = 2
    ERROR = 3


def await_objects(
    store: ObjectStore,
    names: Sequence[str],
    timeout_s: float,
    pause_s: float,
    *,
    closing: threading.Event,
    has_failed: threading.Event,
) -> Future[RemoteFilesExistingCheckStatus]:
    """Begin to wait for some objects.

    Args:
        store: Where they will be.
        names: What they are called.
        timeout_s: When to give up.
        pause_s: How long to wait after an object could not be seen.
        closing: Ends the waiting, at once.
        has_failed: Says that an upload has failed, so that an object may never come.
    """
    answer: Future[RemoteFilesExistingCheckStatus] = Future()
    deadline, missing = time.monotonic() + timeout_s, list(names)

    def look() -> RemoteFilesExistingCheckStatus:
        while missing:
            try:
                store.get_object_size(missing[0])
                missing.pop(0)
                continue
            except (FileNotFoundError, ObjectStoreTransientError):
                pass
            if has_failed.is_set() or closing.is_set():
                return RemoteFilesExistingCheckStatus.ERROR
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return RemoteFilesExistingCheckStatus.TIMEOUT
            closing.wait(min(pause_s, left_s))
        return RemoteFilesExistingCheckStatus.EXIST

    def watch() -> None:
        try:
            answer.set_result(look())
        except Exception as error:  # whatever it is, it belongs to who asked
            answer.set_exception(error)

    threading.Thread(target=watch, name="remote-files", daemon=True).start()
    return answer


log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_STAGGER_VARIABLE = "COMPOSER_LOCAL_RANK_STAGGER_SECONDS"


class RemoteUploader:
    """Copy files to a store in the background, a few at a time.

    Uploads of one name happen in the order in which they were asked for. What fails and may pass is tried again; what
    fails for good is raised by the next `check_workers`, `wait` or `wait_and_close`, with the store's own error as its
    cause. With the variable `COMPOSER_LOCAL_RANK_STAGGER_SECONDS`, each upload waits that long times the local rank.

    Args:
        remote_folder: An address such as `'s3://bucket/folder'`. Names of files count from the bucket.
        backend_kwargs: More arguments of the store.
        num_concurrent_uploads: How many files are sent at a time.
        num_attempts: How often each is tried.
        use_procs: Whether they are sent by processes of their own, for stores whose client keeps Python busy. Threads
            start at once and are as fast otherwise.
        staging_folder: Where copies of files wait; a temporary folder when `None`.

    Raises:
        ValueError: If a count is less than 1, or the address is a local path or malformed.
        NotImplementedError: If nothing here reaches this kind of address.

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
        if not parse_uri(remote_folder).backend:
            raise ValueError(
                f"remote_folder={remote_folder!r} is a local path, to which nothing is uploaded. Give an address such "
                f"as 's3://bucket/folder'."
            )
        self._stagger_s = _read_stagger()
        self.remote_folder, self.backend_kwargs = remote_folder, dict(backend_kwargs or {})
        self.num_concurrent_uploads, self.num_attempts, self.use_procs = num_concurrent_uploads, num_attempts, use_procs
        self.futures: list[Future[None]] = []
        self._latest_of: dict[str, Future[None]] = {}
        # With the placeholders of a run of MLflow in it, the address is not known before training begins.
        is_known = "{mlflow_" not in remote_folder
        self._store: ObjectStore | None = open_store(remote_folder, self.backend_kwargs) if is_known else None
        self._threads: Executor | None = None
        self._processes: Executor | None = None
        self._copies = StagedCopies(staging_folder)
        self._unsent: dict[str, _Unsent] = {}
        self._lock = threading.Lock()
        self._closing, self._has_failed = threading.Event(), threading.Event()

    @property
    def remote_backend(self) -> ObjectStore:
        """The store. It is opened when it is first needed where `remote_folder` names a run of MLflow by placeholders.

        After `wait_and_close` it is opened again.
        """
        if self._store is None:
            self._store = open_store(self.remote_folder, self.backend_kwargs)
        return self._store

    def init(self) -> None:
        """Find out, on rank 0, whether the store lets us write, before any training step.

        Raises:
            StorageError: If not.
        """
        if get_global_rank() == 0:
            validate_credentials(self.remote_backend)

    def upload_file_async(
        self, remote_file_name: str, file_path: str | os.PathLike[str], overwrite: bool, *, copy: bool = True
    ) -> Future[None]:
        """Begin to upload a file, and return at once.

        Args:
            remote_file_name: The object's name in the bucket.
            file_path: The file.
            overwrite: Whether an object that has the name is replaced.
            copy: Whether the file is copied first, so that it may be changed or deleted at once. Otherwise it must
                stay as it is until the future is done.

        Returns:
            A future that holds the upload's error, if any.
        """
        source = self._copies.make(file_path) if copy else Path(file_path)

        def upload() -> None:
            try:
                self._upload(remote_file_name, source, overwrite)
            finally:
                if copy:
                    source.unlink(missing_ok=True)

        return self._submit(remote_file_name, upload)

    def upload_newest_async(
        self, remote_file_name: str, file_path: str | os.PathLike[str], overwrite: bool
    ) -> Future[None]:
        """Begin to upload a file in place of one for that name that still waits, and return at once.

        For files that are written over and over, faster than the store takes them.

        Args:
            remote_file_name: The object's name in the bucket.
            file_path: The file. It is copied first, so that it may be changed or deleted at once.
            overwrite: Whether an object that has the name is replaced.

        Returns:
            A future that holds the upload's error, if any.

        Raises:
            FileExistsError: If an upload for that name waits or is under way, and `overwrite` is false.
        """
        with self._lock:
            unsent = self._unsent.get(remote_file_name)
            if unsent is not None and unsent.future.done():  # with an error, which somebody has or will be told
                unsent = None
            if unsent is not None and not overwrite:
                raise FileExistsError(
                    f"Object {remote_file_name} was already enqueued to be uploaded, but overwrite=False. Choose "
                    f"another name, or pass overwrite=True."
                )
            source = self._copies.make(file_path)
            if unsent is not None and not unsent.has_begun:
                unsent.source.unlink()
                unsent.source, unsent.overwrite = source, unsent.overwrite and overwrite
                return unsent.future
            unsent = self._unsent[remote_file_name] = _Unsent(source, overwrite)
            unsent.future = self._submit(remote_file_name, lambda: self._send_newest(remote_file_name, unsent))
            return unsent.future

    @property
    def has_failed(self) -> bool:
        """Whether any upload has failed for good."""
        return self._has_failed.is_set()

    @property
    def unsent_names(self) -> list[str]:
        """What `upload_newest_async` was given and the store does not have: it waits, is under way, or has failed."""
        with self._lock:
            return list(self._unsent)

    def publish_async(
        self, path: str | os.PathLike[str], remote_name: str, *, pointer: str | None = None, overwrite: bool = False
    ) -> Future[None]:
        """Begin to upload a committed checkpoint with `publish_checkpoint`, and return at once.

        Checkpoints for one pointer are uploaded in the order in which they were asked for, so that the pointer never
        goes back. The file or folder must stay until the future is done.

        Args:
            path: A file or a folder.
            remote_name: Its name in the bucket.
            pointer: The name of the pointer, to which `.symlink` is added.
            overwrite: Whether a whole checkpoint of this name may be replaced.
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

        return self._submit(pointer or remote_name, publish)

    def run_async(self, name: str, work: Callable[[], None]) -> Future[None]:
        """Begin to do something with an object, once what was asked for before with its name has ended.

        Args:
            name: The object's name in the bucket.
            work: Called in a thread of the uploads.

        Returns:
            A future that holds the work's error, if any.
        """
        return self._submit(name, work)

    def point_async(self, pointer: str, target: str, names: Sequence[str], *, timeout_s: float = 3600) -> Future[None]:
        """Begin to wait until all of some objects can be seen, and then let a pointer name them.

        Args:
            pointer: The pointer's whole name, which ends in `.symlink`. One that exists is replaced.
            target: What it names: an object, or what the names of several begin with.
            names: The objects, of whichever rank.
            timeout_s: When to give up.
        """

        def point() -> None:
            status = self.check_remote_files_exist_async(names, timeout_s, _LOOK_AGAIN_S).result()
            if status is not RemoteFilesExistingCheckStatus.EXIST:
                raise RuntimeError(
                    f"{self.remote_backend.get_uri(pointer)} was not written, since not all of {list(names)} arrived "
                    f"({status.name} after at most {timeout_s} s). Look into the logs of the other ranks."
                )
            write_pointer(self.remote_backend, pointer, target, num_attempts=self.num_attempts)

        return self._submit(pointer, point)

    def check_workers(self) -> None:
        """Raise the first error of the uploads that have ended, and forget those."""
        ended = [future for future in self.futures if future.done()]
        self.futures = [future for future in self.futures if not future.done()]
        _raise_first(ended)

    def wait(self) -> None:
        """Wait for all uploads, forget them, and raise the first error."""
        waiting, self.futures = self.futures, []
        for future in waiting:
            future.exception()
        _raise_first(waiting)

    def wait_and_close(self) -> None:
        """Wait for all uploads, let go of threads, processes, copies and connections, and raise the first error.

        The uploader can be used again afterwards.
        """
        try:
            self.wait()
        finally:
            self._close()

    def abandon(self) -> None:
        """Give up what has not begun, wait for what has, and let go of everything as `wait_and_close` does."""
        self._close(cancel=True)
        self.futures.clear()

    def check_remote_files_exist_async(
        self,
        remote_checkpoint_file_names: Sequence[str],
        max_wait_time_in_seconds: float = 3600,
        wait_before_next_try_in_seconds: float = 30,
    ) -> Future[RemoteFilesExistingCheckStatus]:
        """Begin to wait until all of some objects can be seen, such as those that other ranks upload.

        Args:
            remote_checkpoint_file_names: Their names in the bucket.
            max_wait_time_in_seconds: When to give up.
            wait_before_next_try_in_seconds: How long to wait after an object could not be seen.

        Returns:
            A future with `EXIST`, `TIMEOUT`, or `ERROR` if an upload of this uploader failed or it was closed.
        """
        return await_objects(
            self.remote_backend,
            remote_checkpoint_file_names,
            max_wait_time_in_seconds,
            wait_before_next_try_in_seconds,
            closing=self._closing,
            has_failed=self._has_failed,
        )

    def _submit(self, key: str, work: Callable[[], None]) -> Future[None]:
        """Queue work, to begin once earlier work for the same name has ended."""
        if self._threads is None:
            self._closing.clear()
            self._threads = ThreadPoolExecutor(self.num_concurrent_uploads, thread_name_prefix="upload")
        before = self._latest_of.get(key)

        def run() -> None:
            if before is not None:
                before.exception()  # it stands before this in the queue, so that it has begun
            if self._stagger_s:
                time.sleep(self._stagger_s)
            work()

        future = self._threads.submit(run)
        future.add_done_callback(self._remember_failure)
        self._latest_of[key] = future
        self.futures.append(future)
        return future

    def _send_newest(self, name: str, unsent: "_Unsent") -> None:
        with self._lock:
            unsent.has_begun = True
        try:
            self._upload(name, unsent.source, unsent.overwrite)
        finally:
            unsent.source.unlink(missing_ok=True)
        with self._lock:
            if self._unsent.get(name) is unsent:
                del self._unsent[name]

    def _upload(self, name: str, source: Path, overwrite: bool) -> None:
        if not self.use_procs:
            upload_with_retries(self.remote_backend, name, source, overwrite=overwrite, num_attempts=self.num_attempts)
            return
        settings = pickle.dumps((self.remote_folder, self.backend_kwargs))
        self._process_pool().submit(upload_in_process, settings, name, source, overwrite, self.num_attempts).result()

    def _process_pool(self) -> Executor:
        if self._processes is None:
            # Spawned: a forked process would share the connections of this one.
            context = multiprocessing.get_context("spawn")
            self._processes = ProcessPoolExecutor(self.num_concurrent_uploads, mp_context=context)
        return self._processes

    def _remember_failure(self, future: Future[None]) -> None:
        if not future.cancelled() and future.exception() is not None:
            self._has_failed.set()

    def _close(self, *, cancel: bool = False) -> None:
        self._closing.set()
        for executor in (self._threads, self._processes):
            if executor is not None:
                executor.shutdown(cancel_futures=cancel)
        self._copies.remove()
        if self._store is not None:
            self._store.close()
        self._threads = self._processes = self._store = None
        self._latest_of.clear()
        self._unsent.clear()
        self._has_failed.clear()


@dataclass(slots=True, eq=False)
class _Unsent:
    """The newest copy of a file for one name."""

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
        raise ValueError(f"{_STAGGER_VARIABLE}={text!r} is no number of seconds. Set it to one from 0, or unset it.")
    return seconds * get_local_rank() if seconds else 0.0


def _raise_first(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        error = future.exception()
        if error is not None:
            raise error


class StagedCopies:
    """Makes copies in one temporary folder.

    Args:
        folder: In which that folder is made, when it is first needed; the system's own when `None`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._parent = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def make(self, file_path: str | os.PathLike[str]) -> Path:
        """Return the path of a new copy."""
        if self._folder is None:
            if self._parent is not None:
                os.makedirs(self._parent, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(prefix="composer-upload-", dir=self._parent)
        self._count += 1
        copy = Path(self._folder.name) / str(self._count)
        shutil.copyfile(file_path, copy)
        return copy

    def remove(self) -> None:
        """Delete all of them."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()


def upload_in_process(settings: bytes, name: str, source: Path, overwrite: bool, num_attempts: int) -> None:
    """Upload a file with `upload_with_retries`.

    Args:
        settings: The pickled arguments of `open_store`, from the process that started this one.
        name: The object's name.
        source: The file.
        overwrite: Whether an object that has the name is replaced.
        num_attempts: How often it is tried.
    """
    upload_with_retries(_store(settings), name, source, overwrite=overwrite, num_attempts=num_attempts)


@cache
def _store(settings: bytes) -> ObjectStore:
    return open_store(*pickle.loads(settings))
