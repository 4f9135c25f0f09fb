"""A destination of the log that keeps the run's files in a store."""

import multiprocessing as multiprocessing  # tests of users patch `get_context` through this module
import posixpath
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from composer_checkpoint._ranks import Ranks
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.stores.base import ObjectStore, Progress, parse_uri
from composer_checkpoint.stores.databricks import MLFlowObjectStore
from composer_checkpoint.stores.opening import CREDENTIALS_PROBE, arguments_of, check_scheme, validate_credentials
from composer_events.arguments import check_counts, check_flags, check_mappings, check_places, check_texts
from composer_events.formatting import OF_RUN, check_placeholders, format_name_with_dist, partial_format
from composer_events.logger_destination import LoggerDestination

if TYPE_CHECKING:
    from composer_events import Logger, State

__all__ = ["RemoteUploaderDownloader", "maybe_create_remote_uploader_downloader_from_uri"]

_NAME_AS_IT_IS = "{remote_file_name}"
_POLL_S = 2.0


class RemoteUploaderDownloader(LoggerDestination):
    """Upload what callbacks and other loggers hand to `Logger.upload_file`, while training goes on.

    A file is copied when it is handed over. Of several for one name that wait, the newest is uploaded. What fails and
    may pass is tried again; what fails for good is raised at the end of the batch on the rank whose file it was, and at
    the ends of the epoch, of training, of evaluation and of prediction on all ranks alike. Those of training,
    evaluation and prediction wait for the uploads of all ranks.

    The other way round, it is a place from which the Trainer loads: `Trainer(load_object_store=...)`.

    Args:
        bucket_uri: An address such as `'s3://bucket'`. With a folder behind it, names count from there.
        backend_kwargs: The arguments of the store's class, beyond those that the address gives.
        file_path_format_string: What a file is called in the store. `{remote_file_name}` is the name that it was handed
            over with; `{run_name}`, `{rank}`, `{local_rank}`, `{node_rank}`, `{world_size}` and `{local_world_size}`
            are known, too.
        num_concurrent_uploads: How many files are sent at a time.
        upload_staging_folder: Where copies of files wait; a temporary folder when `None`.
        use_procs: Whether files are sent by processes of their own, for stores whose client keeps Python busy. Threads
            start at once, and are as fast otherwise.
        num_attempts: How often a file is tried.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `bucket_uri` is a local path, or a count is less than 1.

    Attributes:
        remote_backend_name: The scheme of the address.
        remote_bucket_name: Its bucket.

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
        self._folder = "" if parsed.backend == "dbfs" else parsed.path
        self._opened: RemoteUploader | None = None
        self._run_name: str | None = None

    @property
    def has_default_names(self) -> bool:
        """Whether `file_path_format_string` was left as it is."""
        return self.file_path_format_string == _NAME_AS_IT_IS

    @property
    def keeps_names(self) -> bool:
        """Whether a file is called in `remote_backend` what it was handed over as."""
        return self.has_default_names and not self._folder

    def serves(self, backend_name: str, bucket_name: str) -> bool:
        """Return whether files go to this bucket."""
        names = [self.remote_backend_name, str(self.backend_kwargs.get("provider", "")).lower()]
        aliases = {"azure": "azure_blobs"}
        return bucket_name == self.remote_bucket_name and aliases.get(backend_name, backend_name) in names

    @property
    def remote_backend(self) -> ObjectStore:
        """The store, which is opened when it is first needed.

        Raises:
            ValueError: If nothing here reaches this kind of address.
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

    def init(self, state: "State", logger: "Logger") -> None:
        """Find out, on rank 0 and for all, whether the store lets us write, before any training step.

        Raises:
            RuntimeError: If it is in use already.
            StorageError: On all ranks, if the store refuses.
        """
        if self._run_name is not None:
            raise RuntimeError(
                f"RemoteUploaderDownloader({self.bucket_uri!r}) is in use by the run {self._run_name!r}. Close that "
                f"Trainer first, or give each of them one of its own."
            )
        ranks = Ranks()
        self._share_mlflow_run(ranks)
        self._run_name = state.run_name
        probe = self._object_name(CREDENTIALS_PROBE, state.run_name)
        ranks.together(lambda: validate_credentials(self.remote_backend, probe) if ranks.rank == 0 else None)

    def upload_file(self, state: "State", remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Begin to upload a copy of a file, and return at once.

        Raises:
            FileExistsError: If an upload for that name waits or is under way, and `overwrite` is false. That the store
                has such an object is found out later, and raised as other errors are.
        """
        name = self._object_name(remote_file_name, state.run_name)
        self._uploader.upload_newest_async(name, file_path, overwrite)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Bring back a file, under the name that it was handed over with; `.symlink` pointers are followed.

        Raises:
            FileNotFoundError: If there is no such file.
            FileExistsError: If there is something at `destination`, and `overwrite` is false.
            StorageError: If the store refuses, or still fails at the fifth attempt.
        """
        if remote_file_name.endswith(".symlink"):  # whoever asks for the pointer itself follows it
            self._download(remote_file_name, destination, overwrite)
        else:
            get_file(remote_file_name, destination, _HandedOver(self._download), overwrite, progress_bar)

    def get_uri_for_file(self, remote_file_name: str) -> str:
        """Return the address of a file that is or will be uploaded."""
        return self.remote_backend.get_uri(self._object_name(remote_file_name, self._run_name))

    def can_upload_files(self) -> bool:
        """Return true: files are kept."""
        return True

    def batch_end(self, state: "State", logger: "Logger") -> None:
        """Raise the first error of this rank's uploads."""
        self._uploader.check_workers()

    def epoch_end(self, state: "State", logger: "Logger") -> None:
        """Raise the first error of any rank's uploads, on all ranks."""
        Ranks().together(self._uploader.check_workers)

    def fit_end(self, state: "State", logger: "Logger") -> None:
        """Wait for the uploads of all ranks, and raise the first error on all of them."""
        self._wait_for_all_ranks()

    def eval_standalone_end(self, state: "State", logger: "Logger") -> None:
        """Wait for the uploads of all ranks, and raise the first error on all of them."""
        self._wait_for_all_ranks()

    def predict_end(self, state: "State", logger: "Logger") -> None:
        """Wait for the uploads of all ranks, and raise the first error on all of them."""
        self._wait_for_all_ranks()

    def post_close(self) -> None:
        """Upload what the others have handed over while they closed, and let go of everything.

        After that it can be used for another run.
        """
        uploader, self._opened, self._run_name = self._opened, None, None
        if uploader is None:
            return
        reason = ""
        try:
            if not uploader.has_failed:
                uploader.wait()
        except Exception as error:  # it is told below, and nothing that is closed later shall miss its turn
            reason = f" ({type(error).__name__}: {error})"
        unsent = uploader.unsent_names
        uploader.abandon()
        if unsent:
            warnings.warn(
                f"The following objects may not have been uploaded, likely due to a worker crash: {', '.join(unsent)}"
                f"{reason}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _wait_for_all_ranks(self) -> None:
        """Ask again and again, since an upload may take longer than a collective waits for a rank."""
        ranks, uploader = Ranks(), self._uploader
        while True:
            ranks.together(uploader.check_workers)
            if ranks.all(not uploader.futures):
                return
            wait(uploader.futures, timeout=_POLL_S)

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

    def _share_mlflow_run(self, ranks: Ranks) -> None:
        """Let all ranks mean the run of MLflow that rank 0's store has begun."""
        path = self.backend_kwargs.get("path", "")
        if "{mlflow_" not in path:
            return

        def begin() -> tuple[str, str] | None:
            store = self.remote_backend if ranks.rank == 0 else None
            return (store.experiment_id, store.run_id) if isinstance(store, MLFlowObjectStore) else None

        ids = ranks.exchange(begin, lambda found: found[:1] * len(found))
        if ids is not None:
            self.backend_kwargs["path"] = partial_format(path, mlflow_experiment_id=ids[0], mlflow_run_id=ids[1])
        if self._opened is not None:
            self._opened.abandon()
            self._opened = None  # what is opened from here on, in other processes as well, has the run's numbers


@dataclass(frozen=True, slots=True)
class _HandedOver:
    """A store in which files have the names that they were handed over with."""

    download_object: Callable[..., None]


def maybe_create_remote_uploader_downloader_from_uri(
    uri: str, loggers: Sequence[LoggerDestination]
) -> RemoteUploaderDownloader | None:
    """Return a destination for the bucket of an address, unless there is one among the loggers already.

    Args:
        uri: An address, whose path is not taken over: names count from the bucket.
        loggers: The destinations that there are.

    Returns:
        The destination; `None` for a local path, and, with a warning, for a bucket that a logger uploads to.

    Raises:
        NotImplementedError: If nothing here reaches this kind of address.

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
                f"used, and no second one is made.",
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
            return RemoteUploaderDownloader(bucket_uri=f"{backend}://{netloc}")
