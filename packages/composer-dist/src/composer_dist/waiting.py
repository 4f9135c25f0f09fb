"""Letting one process of each node go first, while the others wait without a collective."""

import os
import random
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from composer_dist.collectives import barrier, broadcast_object_list, is_initialized
from composer_dist.env import get_local_rank, get_node_rank
from composer_dist.initialize import get_timeout

__all__ = [
    "get_node_signal_file_name",
    "write_signal_file",
    "busy_wait_for_local_rank_zero",
    "local_rank_zero_download_and_wait",
    "run_local_rank_zero_first",
]

_DONE = "local rank zero done"
_FAILED = "local rank zero failed: "
_POLL_S, _LONGEST_POLL_S = 0.01, 0.1


def get_node_signal_file_name(rng: random.Random | None = None) -> str:
    """Return a new file name on which all ranks agree. Every rank must call this.

    Args:
        rng: What the name is drawn from, on rank 0. A generator of its own when `None`, so that those that training
            draws from stay as they are.
    """
    rng = rng or random.Random()
    suffix = "".join(rng.choices(string.ascii_letters + string.digits, k=6))
    name = [f"._signal_file_node{get_node_rank()}_{suffix}"]
    broadcast_object_list(name, src=0)
    return name[0]


def write_signal_file(signal_file_name: str, dir_path: str | None = None) -> str:
    """Return the path of a signal file, which the node's local rank 0 has then written.

    Args:
        signal_file_name: As `get_node_signal_file_name` returned it.
        dir_path: The folder, made if need be. The current one when `None`.
    """
    return _write(signal_file_name, dir_path, _DONE)


@contextmanager
def local_rank_zero_download_and_wait(expected_file_path: str, *, timeout: float | None = None) -> Iterator[None]:
    """Run the body at once on local rank 0, and on the node's other ranks once the file exists.

    Needs no process group. The file must appear whole: write it beside its place, then rename it.

    Args:
        expected_file_path: What local rank 0 brings into being.
        timeout: Seconds to wait. Those that `initialize_dist` was given when `None`.

    Raises:
        TimeoutError: If the file has not appeared by then.
    """
    if get_local_rank() != 0:
        _wait_for(Path(expected_file_path), timeout)
    yield


@contextmanager
def busy_wait_for_local_rank_zero(dir_path: str | None = None, *, timeout: float | None = None) -> Iterator[None]:
    """Run the body everywhere, and leave once the node's local rank 0 has finished it. Every rank must call this.

    Ranks that are done look for a file and not for a message, so local rank 0 may take longer than a collective would
    wait. Each node has a file of its own, also in a folder that nodes share, and it is gone when the context is left.

    Args:
        dir_path: A folder that all ranks of the node see. The current one when `None`.
        timeout: Seconds to wait after the body. Those that `initialize_dist` was given when `None`.

    Raises:
        RuntimeError: On every rank of the node, if the body failed on local rank 0, which raises its own error.
        TimeoutError: If local rank 0 has not finished by then.
    """
    name = get_node_signal_file_name()
    outcome = _DONE
    try:
        yield
    except BaseException as error:
        outcome = f"{_FAILED}{type(error).__name__}: {error}"
        raise
    finally:
        _leave_together(name, dir_path, outcome, timeout)


@contextmanager
def run_local_rank_zero_first() -> Iterator[None]:
    """Run the body on each node's local rank 0 first, and then on the others. Every rank must call this.

    The others go on also if the body failed on local rank 0.

    Raises:
        RuntimeError: If several processes were started and there is no process group.
    """
    if not is_initialized():
        barrier()  # raises where there should be others
        yield
        return
    first = get_local_rank() == 0
    if not first:
        barrier()
    try:
        yield
    finally:
        if first:
            barrier()


def _leave_together(name: str, dir_path: str | None, outcome: str, timeout: float | None) -> None:
    """Meet the other ranks once local rank 0 has written its outcome, and raise if that was a failure."""
    first = get_local_rank() == 0
    # Nodes may share the folder, and each waits for its own first process.
    path = Path(_write(f"{name}_of_node{get_node_rank()}", dir_path, outcome))
    try:
        if not first:
            _wait_for(path, timeout)
            outcome = path.read_text()
        barrier()  # everybody has read it
    finally:
        if first:
            path.unlink(missing_ok=True)
    barrier()  # nobody goes on and still sees it
    if not first and outcome.startswith(_FAILED):
        raise RuntimeError(f"{outcome} (the traceback is that of local rank 0 of node {get_node_rank()})")


def _write(name: str, dir_path: str | None, text: str) -> str:
    """Make the folder, let local rank 0 write the file as a whole, and return its path."""
    folder = os.getcwd() if dir_path is None else dir_path
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    if get_local_rank() == 0:
        unfinished = Path(f"{path}.{uuid4().hex}.part")  # other nodes may write the same file into a shared folder
        unfinished.write_text(text)
        unfinished.replace(path)
    return path


def _wait_for(path: Path, timeout: float | None) -> None:
    """Look for a file, at first often and then every tenth of a second."""
    timeout = get_timeout() if timeout is None else timeout
    deadline, pause = time.monotonic() + timeout, _POLL_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} did not appear within {timeout} s. Local rank 0 writes it: look into its log for what kept "
                "it, check that this rank sees the same folder, or pass initialize_dist() a longer timeout."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_S)
