"""Uploads of committed checkpoints, to the store of a remote folder or to loggers that accept files."""

import os
import posixpath
import tempfile
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from composer_checkpoint._ranks import Ranks
from composer_checkpoint.names import PartialFilePath, sharded_folder
from composer_checkpoint.remote.fetch import create_symlink_file
from composer_checkpoint.remote.publish import SYMLINK_SUFFIX, write_pointer
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.retention import KeptRemotely
from composer_checkpoint.state import Layout, layout_of, own_file, prefix_dir_of
from composer_checkpoint.stores.base import is_uri
from composer_dist.progress import progress_recorder
from composer_events.formatting import partial_format
from composer_events.logger import Logger
from composer_events.state import State
from composer_time import Timestamp


@dataclass(frozen=True, slots=True)
class Save:
    """One save: its names, the time in training, and the metrics of that time. Names of per-rank files keep `{rank}`.

    `address` is its location if that is in a store; `path` is then the same address, or a temporary file.
    """

    path: str
    address: str | None
    timestamp: Timestamp
    metrics: dict[str, float]
    link: str | None
    remote_name: str | None
    remote_pointer: str | None


def within_folder(state: State, filename: str) -> str:
    """Return the template of a save below the folder: a file, or the folder of a sharded checkpoint."""
    return sharded_folder(filename, prefix_dir_of(state)) if layout_of(state) is Layout.SHARDED else filename


def template_of_run(state: State, name: PartialFilePath | None) -> str | None:
    """Return the template of this run's saves below the folder, or `None` if they are not saved there."""
    return None if name is None else partial_format(within_folder(state, name.filename), run_name=state.run_name)


_POLL_S = 2.0
# The state of a rank's uploads. All ranks act on the lowest value of any rank.
_HAS_ENDED, _UNDER_WAY, _NOTHING = range(3)


class CheckpointUploads:
    """Upload checkpoints in the background to a remote folder, or hand them to loggers.

    Not every rank has something to upload; errors are raised on all of them. `wait` waits for at most `timeout_s`.

    Attributes:
        overwrite: Whether a complete checkpoint of the same name may be replaced.
        are_watched: Whether any rank may be uploading, so that `check` must communicate; the same on all ranks.
    """

    def __init__(
        self, uploader: RemoteUploader | None, overwrite: bool, timeout_s: float, kept: KeptRemotely | None = None
    ) -> None:
        self._uploader = uploader
        self.overwrite = overwrite
        self._timeout_s = timeout_s
        self._kept = kept
        self._failures: list[Exception] = []
        self.are_watched = False

    def send(self, job: Save, logger: Logger) -> Future[None] | None:
        """Begin to upload this rank's part of a save, and then update the pointer.

        Errors are raised by `check` and `wait`.
        """
        if job.remote_name is None:
            return None
        path, name = own_file(job.path), own_file(job.remote_name)
        try:
            upload, pointer = None, job.remote_pointer
            if self._uploader is None:
                self._hand_to_loggers(path, name, pointer, logger)
            elif not is_uri(path):
                upload = self._uploader.publish_async(path, name, pointer=pointer, overwrite=self.overwrite)
            elif pointer is not None:  # the ranks have written the checkpoint there already
                write_pointer(self._uploader.remote_backend, pointer + SYMLINK_SUFFIX, name)
        except Exception as error:  # raised later, on all ranks at once
            self._failures.append(error)
            return None
        if self._kept is not None:
            # All names, since an older checkpoint is deleted only once all ranks' files of a newer one are stored.
            of_ranks = [job.remote_name.replace("{rank}", str(rank)) for rank in range(Ranks().world_size)]
            self._kept.add(name, list(dict.fromkeys(of_ranks)), job.timestamp, job.metrics, upload)
        return upload

    def check(self, *, more_to_come: bool = False) -> None:
        """Raise the first error of a finished upload on any rank, on all ranks. Every rank must call this.

        The ranks communicate only from a save until the end of its upload.
        """
        if not self.are_watched:
            return
        ranks, futures = Ranks(), self._futures
        if self._failures or any(future.done() for future in futures):
            here = _HAS_ENDED
        else:
            here = _UNDER_WAY if futures else _NOTHING
        # All ranks must take the same branch, since both raising and waiting are collective.
        anywhere = ranks.least(here)
        if anywhere == _HAS_ENDED:
            ranks.together(self._raise_first)
        elif anywhere == _NOTHING and not more_to_come:
            self.are_watched = False

    def wait(self) -> None:
        """Wait until no rank is uploading. Every rank must call this."""
        if self._uploader is None and not self.are_watched:
            return
        self._wait()
        if self._kept is not None:
            self._kept.rotate()  # only now, since it depends on the uploads of all ranks
            self._wait()
        self.are_watched = False

    def close(self) -> None:
        """Wait for this rank's uploads, without other ranks, which may have exited, and close connections."""
        if self._uploader is not None:
            self._uploader.wait_and_close()
        self._raise_first()

    def _wait(self) -> None:
        ranks, deadline = Ranks(), time.monotonic() + self._timeout_s
        while True:  # in short steps: an upload may take longer than the timeout of a collective
            ranks.together(lambda: self._raise_first(deadline))
            if (recorder := progress_recorder()) is not None:
                recorder.note_progress()  # the launcher must not end the run before the deadline
            if ranks.all(not self._futures):  # agreed on, so that all ranks leave the loop in the same step
                return
            wait(self._futures, timeout=max(0.0, min(_POLL_S, deadline - time.monotonic())))

    @property
    def _futures(self) -> list[Future[None]]:
        return [] if self._uploader is None else self._uploader.futures

    def _raise_first(self, deadline: float | None = None) -> None:
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]
        if self._uploader is None:
            return
        self._uploader.check_workers()
        if self._uploader.futures and deadline is not None and time.monotonic() >= deadline:
            raise RuntimeError(
                f"{len(self._uploader.futures)} uploads to {self._uploader.remote_folder} have not ended within "
                f"upload_timeout_in_seconds={self._timeout_s!r}. Check the connection, or raise the timeout."
            )

    def _hand_to_loggers(self, path: str, name: str, pointer: str | None, logger: Logger) -> None:
        destinations = getattr(logger, "destinations", ())
        if not any(destination.can_upload_files() for destination in destinations):
            return
        found = Path(path).rglob("*") if os.path.isdir(path) else [Path(path)]
        for file in sorted(file for file in found if file.is_file()):
            remote_name = posixpath.normpath(posixpath.join(name, file.relative_to(path).as_posix()))
            logger.upload_file(remote_name, file, overwrite=self.overwrite)
        if pointer is None:
            return
        # Loggers do not need the file after `upload_file` returns.
        with tempfile.TemporaryDirectory() as folder:
            link = os.path.join(folder, "latest" + SYMLINK_SUFFIX)
            create_symlink_file(name, link)
            logger.upload_file(pointer + SYMLINK_SUFFIX, link, overwrite=True)
