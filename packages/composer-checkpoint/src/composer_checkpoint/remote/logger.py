"""Logger destination that uploads a run's files to an object store."""

import multiprocessing as multiprocessing  # tests of users patch `get_context` through this module
import posixpath
import warnings
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from composer_checkpoint._ranks import Ranks
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.stores.base import ObjectStore, Progress, parse_uri
from composer_checkpoint.stores.opening import (
    CREDENTIALS_PROBE,
    arguments_of,
    check_scheme,
    probe_name,
    validate_credentials,
)
from composer_dist.progress import progress_recorder
from composer_events.arguments import check_counts, check_flags, check_mappings, check_places, check_texts
from composer_events.formatting import OF_RUN, check_placeholders, format_name_with_dist, partial_format
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination
from composer_events.state import State

_NAME_AS_IT_IS = "{remote_file_name}"
_POLL_S = 2.0


class RemoteUploaderDownloader(LoggerDestination):
    """Logger destination that uploads files passed to `Logger.upload_file` in the background.

    Each file is copied when it is passed in; if several for one name are queued, only the newest is uploaded. Transient
    errors are retried. A permanent error is raised at the end of the batch on the rank whose file failed, and on all
    ranks at the end of the epoch, of training, of evaluation or of prediction. The ends of training, evaluation and
    prediction wait for the uploads of all ranks.

    It can also be passed as `Trainer(load_object_store=...)` to load checkpoints.

    Args:
        bucket_uri: An address such as `'s3://bucket'`. With a folder in it, names are relative to the folder.
        backend_kwargs: Arguments of the store's class, in addition to those of the address.
        file_path_format_string: Format of the object names. `{remote_file_name}` is the name passed to `upload_file`;
            `{run_name}`, `{rank}`, `{local_rank}`, `{node_rank}`, `{world_size}` and `{local_world_size}` also work.
        num_concurrent_uploads: Number of simultaneous uploads.
        upload_staging_folder: Folder for the copies of files; a temporary folder when `None`.
        use_procs: Whether to upload in separate processes, for stores whose client holds the GIL. Otherwise threads
            are as fast, and start at once.
        num_attempts: Number of attempts per file.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `bucket_uri` is a local path, or a count is less than 1.

    Attributes:
        remote_backend_name: Scheme of the address.
        remote_bucket_name: Bucket of the address.

    Example:
        >>> import tempfile
        >>> from composer_events import Engine, Event, Logger, State
        >>> keeper = RemoteUploaderDownloader("memory://docs", file_path_format_string="{run_name}/{remote_file_name}")
        >>> state = State(None, rank_zero_seed=1, run_name="plum", device="cpu", callbacks=[keeper])
        >>> engine = Engine(state, Logger(state, keeper))
        >>> _ = engine.run_event(Event.INIT)
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     engine.logger.upload_file("notes.txt", file.name)
        >>> keeper.get_uri_for_file("notes.txt")
        'memory://docs/plum/notes.txt'
        >>> engine.close()
    """

    def __init__(
        self,
        bucket_uri: str,
        backend_kwargs: dict[str, Any] | None = None,
        file_path_format_string: str = _NAME_AS_IT_IS,
        num_concurrent_uploads: int = 1,
        upload_staging_folder: str | None = None,
        use_procs: bool = False,
        num_attempts: int = 3,
    ) -> None:
        check_texts(bucket_uri=bucket_uri, file_path_format_string=file_path_format_string)
        check_placeholders(OF_RUN | {"remote_file_name"}, file_path_format_string=file_path_format_string)
        check_mappings(backend_kwargs=backend_kwargs)
        check_counts(num_concurrent_uploads=num_concurrent_uploads, num_attempts=num_attempts)
        check_flags(may_be_none=True, use_procs=use_procs)
        if upload_staging_folder is not None:
            check_places(upload_staging_folder=upload_staging_folder)
        parsed = parse_uri(bucket_uri)
        if not parsed.backend:
            raise ValueError(
                f"bucket_uri={bucket_uri!r} is a local path, to which nothing is uploaded. Give an address such as "
                f"'s3://bucket'."
            )
        self.bucket_uri, self.file_path_format_string = bucket_uri, file_path_format_string
        self.remote_backend_name, self.remote_bucket_name = parsed.backend, urlsplit(bucket_uri).netloc
        self.backend_kwargs: dict[str, Any] = {**arguments_of(bucket_uri), **(backend_kwargs or {})}
        self.num_concurrent_uploads, self.num_attempts, self.use_procs = num_concurrent_uploads, num_attempts, use_procs
        self.upload_staging_folder = upload_staging_folder
        # The path of a dbfs address is an argument of the store itself, not a prefix of names.
        self._folder = "" if parsed.backend == "dbfs" else parsed.path
        self._probe = CREDENTIALS_PROBE
        self._opened: RemoteUploader | None = None
        self._run_name: str | None = None

    @property
    def has_default_names(self) -> bool:
        """Return whether `file_path_format_string` is the default."""
        return self.file_path_format_string == _NAME_AS_IT_IS

    @property
    def keeps_names(self) -> bool:
        """Return whether objects have the names passed to `upload_file`."""
        return self.has_default_names and not self._folder

    def serves(self, backend_name: str, bucket_name: str) -> bool:
        """Return whether files are uploaded to this bucket."""
        names = [self.remote_backend_name, str(self.backend_kwargs.get("provider", "")).lower()]
        aliases = {"azure": "azure_blobs"}  # libcloud's name of the provider
        return bucket_name == self.remote_bucket_name and aliases.get(backend_name, backend_name) in names

    @property
    def remote_backend(self) -> ObjectStore:
        """Object store of the address, opened on first use.

        Raises:
            ValueError: If no store supports this kind of address.
        """
        return self._uploader.remote_backend

    @property
    def _uploader(self) -> RemoteUploader:
        if self._opened is None:
            try:
                self._opened = RemoteUploader(
                    self.bucket_uri,
                    self.backend_kwargs,
                    self.num_concurrent_uploads,
                    self.num_attempts,
                    use_procs=self.use_procs,
                    staging_folder=self.upload_staging_folder,
                )
            except NotImplementedError as error:
                raise ValueError(f"bucket_uri={self.bucket_uri!r} cannot be used: {error}") from error
        return self._opened

    def init(self, state: State, logger: Logger) -> None:
        """Validate on rank 0, before training starts, that the store accepts uploads.

        Every rank must call this.

        Raises:
            RuntimeError: If another run is using this destination.
            StorageError: On all ranks, if the store rejects the upload.
        """
        if self._run_name is not None:
            raise RuntimeError(
                f"RemoteUploaderDownloader({self.bucket_uri!r}) is in use by the run {self._run_name!r}. Close that "
                f"Trainer first, or give each of them one of its own."
            )
        path = self.backend_kwargs.get("path", "")
        if "{mlflow_" in path:  # before the store is used, since the run is part of its address
            ids = self._uploader.begin_mlflow_run()
            if ids is not None:
                self.backend_kwargs["path"] = partial_format(path, mlflow_experiment_id=ids[0], mlflow_run_id=ids[1])
            self._uploader.abandon()
            self._opened = None  # reopened with the IDs of the run, also in upload processes
        self._run_name = state.run_name
        probe = self._object_name(self._probe, state.run_name)
        Ranks().from_first(lambda: validate_credentials(self.remote_backend, probe))

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Start to upload a copy of a file in the background.

        Raises:
            FileExistsError: If an upload of the same name is queued or running and `overwrite` is false. If the store
                already has the object, the error is raised later, like other upload errors.
        """
        name = self._object_name(remote_file_name, state.run_name)
        self._uploader.upload_newest_async(name, file_path, overwrite)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Download a file by the name it was uploaded with, following `.symlink` pointers.

        Raises:
            FileNotFoundError: If the file does not exist.
            FileExistsError: If `destination` exists and `overwrite` is false.
            StorageError: If the store refuses, or the fifth attempt fails too.
        """
        if remote_file_name.endswith(".symlink"):  # the caller wants the pointer itself
            self._download(remote_file_name, destination, overwrite)
        else:
            # Pointers contain names as passed to `upload_file`, so `get_file` must format each name that it follows.
            get_file(
                remote_file_name, destination, SimpleNamespace(download_object=self._download), overwrite, progress_bar
            )

    def get_uri_for_file(self, remote_file_name: str) -> str:
        """Return the address of an uploaded file, whether or not it has arrived."""
        return self.remote_backend.get_uri(self._object_name(remote_file_name, self._run_name))

    def can_upload_files(self) -> bool:
        """Return `True`."""
        return True

    def batch_end(self, state: State, logger: Logger) -> None:
        """Raise the first error of this rank's uploads."""
        self._uploader.check_workers()

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Raise the first error of any rank's uploads, on all ranks."""
        Ranks().together(self._uploader.check_workers)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait for the uploads of all ranks, and raise the first error on all of them."""
        ranks, uploader = Ranks(), self._uploader
        while True:  # polls, since an upload may outlast the timeout of a collective
            ranks.together(uploader.check_workers)
            if ranks.all(not uploader.futures):
                return
            wait(uploader.futures, timeout=_POLL_S)  # a rank without uploads waits in the next collective
            if (recorder := progress_recorder()) is not None:
                recorder.note_progress()  # the launcher must not end the run before the uploads

    eval_standalone_end = predict_end = fit_end

    def post_close(self) -> None:
        """Upload the files of loggers that have closed, then release all resources.

        Afterwards the destination can serve another run.
        """
        uploader, self._opened, self._run_name = self._opened, None, None
        if uploader is None:
            return
        reason = ""
        try:
            if not uploader.has_failed:
                uploader.wait()
        except Exception as error:  # only reported in the warning, since the other callbacks must still be closed
            reason = f" ({type(error).__name__}: {error})"
        unsent = uploader.unsent_names  # before `abandon`, which clears them
        uploader.abandon()
        if unsent:
            warnings.warn(
                f"The following objects may not have been uploaded, likely due to a worker crash: {', '.join(unsent)}"
                f"{reason}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _object_name(self, remote_file_name: str, run_name: str | None) -> str:
        if run_name is None and "{run_name" in self.file_path_format_string:
            raise RuntimeError(
                f"file_path_format_string={self.file_path_format_string!r} needs the name of the run, which is not "
                f"known before a Trainer has this among its loggers. Put it there."
            )
        name = format_name_with_dist(self.file_path_format_string, run_name or "", remote_file_name=remote_file_name)
        return posixpath.join(self._folder, name.lstrip("/"))

    def _download(self, name: str, filename: str, overwrite: bool = False, callback: Progress | None = None) -> None:
        object_name = self._object_name(name, self._run_name)
        self.remote_backend.download_object(object_name, filename, overwrite=overwrite, callback=callback)


def maybe_create_remote_uploader_downloader_from_uri(
    uri: str, loggers: Sequence[LoggerDestination]
) -> RemoteUploaderDownloader | None:
    """Return a logger destination for the bucket of an address, unless one of the loggers serves it.

    Args:
        uri: An address. Its path is ignored: names are relative to the bucket.
        loggers: Logger destinations that exist already.

    Returns:
        The destination; `None` for a local path and, with a warning, for a bucket that a logger uploads to.

    Raises:
        NotImplementedError: If no store supports this kind of address.

    Example:
        >>> maybe_create_remote_uploader_downloader_from_uri("memory://bucket/traces", []).bucket_uri
        'memory://bucket'
    """
    backend, bucket, path = parse_uri(uri)
    if not backend:
        return None
    check_scheme(uri)
    netloc = urlsplit(uri).netloc
    for destination in loggers:
        if isinstance(destination, RemoteUploaderDownloader) and destination.serves(backend, netloc):
            warnings.warn(
                f"There already exists a RemoteUploaderDownloader object to handle the uri: {uri} specified. It is "
                f"used, and a second one is not created.",
                UserWarning,
                stacklevel=2,
            )
            return None
    match backend:
        case "azure":
            return RemoteUploaderDownloader(
                bucket_uri=f"libcloud://{bucket}",
                backend_kwargs={
                    "provider": "AZURE_BLOBS",
                    "container": bucket,
                    "key_environ": "AZURE_ACCOUNT_NAME",
                    "secret_environ": "AZURE_ACCOUNT_ACCESS_KEY",
                },
            )
        case "dbfs":
            return RemoteUploaderDownloader(bucket_uri=uri, backend_kwargs={"path": path})
        case _:
            sender = RemoteUploaderDownloader(bucket_uri=f"{backend}://{netloc}")
            sender._probe = probe_name(uri)
            return sender
