"""Waiting until objects of a store can be seen, such as those that other ranks upload."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from enum import IntEnum

from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError

__all__ = ["RemoteFilesExistingCheckStatus", "await_objects"]


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
