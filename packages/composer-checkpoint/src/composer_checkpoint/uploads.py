"""Copies of committed checkpoints, in the store of a remote folder or with loggers that take files."""

import os
import posixpath
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_checkpoint.conflicts import ensure_store_has_no_conflicting_objects
from composer_checkpoint.fetching import create_symlink_file
from composer_checkpoint.publish import SYMLINK_SUFFIX, write_pointer
from composer_checkpoint.remote_retention import KeptRemotely
from composer_checkpoint.save_names import Save
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.state_io import own_file
from composer_checkpoint.stores.addresses import is_uri, parse_uri
from composer_checkpoint.upload import RemoteUploader
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer_events import Logger

__all__ = ["CheckpointUploads"]

_POLL_S = 30.0
# What a rank says of its uploads; the least of them is what all ranks act upon.
_HAS_ENDED, _UNDER_WAY, _NOTHING = range(3)


class CheckpointUploads:
    """Sends checkpoints in the background where there is a remote folder, and hands them to loggers otherwise.

    Not every rank has something to send; what goes wrong is raised on all of them.

    Args:
        uploader: Of the remote folder, if there is one.
        overwrite: Whether a whole checkpoint of the same name may be replaced.
        timeout_s: How long `wait` waits on each rank.
        kept: What stays in the store; `None` for all.

    Attributes:
        overwrite: As above.
        ranked_by: The metric by which the best are kept in the store, if any.
    """

    def __init__(
        self, uploader: RemoteUploader | None, overwrite: bool, timeout_s: float, kept: KeptRemotely | None = None
    ) -> None:
        self._uploader = uploader
        self.overwrite = overwrite
        self._timeout_s = timeout_s
        self._kept = kept
        self.ranked_by = None if kept is None else kept.policy.metric
        self._addresses: dict[str, str] = {}
        self._failures: list[Exception] = []
        self._are_watched = False  # the same on all ranks

    @property
    def may_have_news(self) -> bool:
        """Whether `check` or `rotate` can have anything to do, alike on all ranks."""
        return self._are_watched or self._kept is not None

    @property
    def addresses(self) -> list[str]:
        """Where this process has saved in the store what was not deleted there, oldest first."""
        deleted = () if self._kept is None else self._kept.deleted
        return [address for name, address in self._addresses.items() if name not in deleted]

    @addresses.setter
    def addresses(self, addresses: list[str]) -> None:
        self._addresses = {parse_uri(address).path: address for address in addresses}

    def note(self, job: Save) -> None:
        """Take note of a save that was committed. One of the same name is gone."""
        if job.address is not None and job.remote_name is not None:
            self._addresses.pop(own_file(job.remote_name), None)
            self._addresses[own_file(job.remote_name)] = own_file(job.address)

    def expect(self) -> None:
        """Watch what a save will send, on whichever rank. Every rank must call this."""
        self._are_watched = True

    def refuse_later(self, template: str, timestamp: Timestamp) -> None:
        """Raise, on all ranks, if the store has later checkpoints. Every rank must call this.

        Args:
            template: What they are called.
            timestamp: Where the run is.
        """
        if self._uploader is None:
            return
        ranks, store = Ranks(), self._uploader.remote_backend
        ranks.together(
            lambda: ensure_store_has_no_conflicting_objects(store, template, timestamp) if ranks.rank == 0 else None
        )

    def send(self, job: Save, logger: "Logger") -> Future[None] | None:
        """Begin to copy what this rank has saved, and then let a pointer name it.

        What goes wrong is raised by `check` and `wait`.

        Args:
            job: The save; if its path is an address, it was written to the store at once.
            logger: Has the destinations that take files.

        Returns:
            What is under way, during which the file must stay.
        """
        if job.remote_name is None:
            return None
        path, name = own_file(job.path), own_file(job.remote_name)
        try:
            upload = self._send(path, name, job.remote_pointer, logger)
        except Exception as error:  # the other ranks must hear of it, whatever it is
            self._failures.append(error)
            return None
        if self._kept is not None:
            of_ranks = [job.remote_name.replace("{rank}", str(rank)) for rank in range(Ranks().world_size)]
            self._kept.add(name, list(dict.fromkeys(of_ranks)), job.timestamp, job.metrics, upload)
        return upload

    def rotate(self) -> None:
        """Begin to delete from the store what need not be kept there."""
        if self._kept is not None:
            self._kept.rotate()

    def check(self, *, more_to_come: bool = False) -> None:
        """Raise the first error of what has ended on any rank, on all of them. Every rank must call this.

        The ranks talk to each other only from a save to the end of its upload.

        Args:
            more_to_come: Whether a checkpoint is being written that is still to be sent.
        """
        if not self._are_watched:
            return
        ranks, futures = Ranks(), self._futures
        if self._failures or any(future.done() for future in futures):
            here = _HAS_ENDED
        else:
            here = _UNDER_WAY if futures else _NOTHING
        anywhere = ranks.least(here)
        if anywhere == _HAS_ENDED:
            ranks.together(self._raise_first)
        elif anywhere == _NOTHING and not more_to_come:
            self._are_watched = False

    def wait(self) -> None:
        """Return when nothing is under way on any rank. Every rank must call this.

        Raises:
            RuntimeError: On all ranks, if that takes too long on any.
        """
        if self._uploader is None and not self._are_watched:
            return
        self._wait()
        if self._kept is not None:
            self._kept.rotate()  # by what all ranks have uploaded
            self._wait()
        self._are_watched = False

    def close(self) -> None:
        """Wait, without asking other ranks, which may be gone, and let go of connections."""
        if self._uploader is not None:
            self._uploader.wait_and_close()
        self._raise_first()

    def state_dict(self, job: Save | None) -> dict[str, Any] | None:
        """Return which checkpoints there are in the store, the one that is being saved included."""
        if self._kept is None:
            return None
        saved = self._kept.state_dict()
        if job is not None and job.remote_name is not None:
            saved["saved"].append((own_file(job.remote_name), job.timestamp.state_dict(), job.metrics))
        return saved

    def load_state_dict(self, saved: Mapping[str, Any], template: str | None) -> None:
        """Take over which checkpoints there are in the store, of those that are called as this run calls its own."""
        if self._kept is not None and template is not None:
            self._kept.load_state_dict(saved, template)

    def _wait(self) -> None:
        ranks, deadline = Ranks(), time.monotonic() + self._timeout_s
        while True:  # an upload may take longer than a collective waits for a rank
            ranks.together(lambda: self._raise_first(deadline))
            if ranks.all(not self._futures):
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
                f"upload_timeout_in_seconds={self._timeout_s!r}. Look at the connection, or allow for more time."
            )

    def _send(self, path: str, name: str, pointer: str | None, logger: "Logger") -> Future[None] | None:
        if self._uploader is None:
            self._hand_to_loggers(path, name, pointer, logger)
        elif not is_uri(path):
            return self._uploader.publish_async(path, name, pointer=pointer, overwrite=self.overwrite)
        elif pointer is not None:
            write_pointer(self._uploader.remote_backend, pointer + SYMLINK_SUFFIX, name)
        return None

    def _hand_to_loggers(self, path: str, name: str, pointer: str | None, logger: "Logger") -> None:
        destinations = getattr(logger, "destinations", ())
        if not any(destination.can_upload_files() for destination in destinations):
            return
        for file, remote_name in _files(path, name):
            logger.upload_file(remote_name, file, overwrite=self.overwrite)
        if pointer is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            link = os.path.join(folder, "latest" + SYMLINK_SUFFIX)
            create_symlink_file(name, link)
            logger.upload_file(pointer + SYMLINK_SUFFIX, link, overwrite=True)


def _files(path: str, name: str) -> Iterator[tuple[Path, str]]:
    if not os.path.isdir(path):
        yield Path(path), name
        return
    for file in sorted(Path(path).rglob("*")):
        if file.is_file():
            yield file, posixpath.join(name, file.relative_to(path).as_posix())
