"""Functions run in several processes, for tests of collectives, and a simulated accelerator."""

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_dist.launch import stacks

if TYPE_CHECKING:
    from composer_dist.simulated_accelerator import DeviceCounts as DeviceCounts
    from composer_dist.simulated_accelerator import SimulatedAccelerator as SimulatedAccelerator

_SIMULATION = ("DeviceCounts", "SimulatedAccelerator")
__all__ = ["DeviceCounts", "SimulatedAccelerator", "run_ranks"]

# The first optimizer of a process imports torch._dynamo, which takes a second or more.
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "composer_dist.dist"]
# Imports as slowly; the ranks most likely need it if the calling process has loaded it.
_PRELOADED_AFTER = ["torchmetrics"]
_GOODBYE_S = 5.0  # time for a rank to exit after it has sent its answer
_PATIENCE = 0.75  # the fraction of the timeout after which a collective raises, so that its error arrives in time
_STACKS = 0.7  # the fraction of it after which ranks are asked for their stack traces: before a collective raises
_AFTERMATH_S = 0.3  # time to wait for the other ranks' errors after the first failure


def __getattr__(name: str) -> object:
    if name not in _SIMULATION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from composer_dist import simulated_accelerator  # torch, which the ranks load elsewhere

    return getattr(simulated_accelerator, name)


def run_ranks(
    body: Callable[..., Any], *args: Any, store: str | os.PathLike[str], world_size: int = 2, timeout_s: float = 60
) -> list[Any]:
    """Call a function in several processes connected by gloo, and return its results.

    Each process computes with one thread, and has this process's current environment with the variables `RANK`,
    `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` and `NODE_RANK` of a single node. Processes are forked from a server
    that has imported torch: the first call takes some seconds and later ones about one. They end with this process,
    even if it is killed. A script that calls this needs `if __name__ == "__main__":`.

    Args:
        body: A function at the top level of a file, which each process loads from there: a test module need not be
            importable. It is limited to CPUs, and may start processes of its own, such as the workers of a
            `DataLoader`.
        *args: Arguments of the body. They and the result are pickled, and tensors copied. Their classes may be
            defined in the body's file.
        store: Path of the rendezvous file, which must not exist, such as `tmp_path / "store"`.
        world_size: Number of processes.
        timeout_s: Seconds until the processes are killed; collectives raise after three quarters of it.

    Returns:
        The results in rank order.

    Raises:
        ValueError: If `body` is not at the top level of a file, or if `store` exists.
        AssertionError: If a rank raised, died or did not finish; with its traceback, its exit code, or its stack traces
            and those of its forked children shortly before collectives raise.
    """
    if Path(store).exists():
        raise ValueError(f"store={str(store)!r} exists: ranks of an earlier run met there. Choose another name.")
    if "." in body.__qualname__:
        raise ValueError(f"body={body!r} is not at the top level of a file. Define it there, and pass what it needs.")
    call = (body.__module__, inspect.getfile(body), body.__name__, pickle.dumps(args))
    size = str(world_size)
    # The whole environment, since the fork server keeps that of the first call, with a launcher's variables.
    environ = {**os.environ, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "NODE_RANK": "0"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *(name for name in _PRELOADED_AFTER if name in sys.modules)])
    ranks: list[_Rank] = []
    notes = tempfile.TemporaryDirectory(prefix="ranks-")
    try:
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            written = Path(notes.name, f"rank{rank}")
            own = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            task = _Task(rank, world_size, str(store), timeout_s, own, written, *call)
            # Daemonic processes may not start children.
            process = context.Process(target=_run, args=(task, writer), daemon=False)
            process.start()
            writer.close()  # the child holds the other copy, so that its death closes the pipe
            ranks.append(_Rank(rank, process, reader, written))
        results = _results(ranks, _collect(ranks, timeout_s), timeout_s)
        for finished in ranks:
            finished.process.join(_GOODBYE_S)
        return results
    finally:
        for started in ranks:
            started.process.kill()
            started.process.join()
            started.reader.close()
        notes.cleanup()


@dataclass(frozen=True, slots=True)
class _Task:
    """A rank's place in the group, its limits, and the body by its location."""

    rank: int
    world_size: int
    store: str
    timeout_s: float
    environ: dict[str, str]
    stacks: Path  # the file for the rank's stack traces
    module: str
    file: str
    name: str
    args: bytes  # pickled, since they may need the body's module to load


@dataclass(frozen=True, slots=True)
class _Rank:
    """A started process and the pipe of its answer."""

    rank: int
    process: BaseProcess
    reader: Connection
    stacks: Path


@dataclass(frozen=True, slots=True)
class _Answer:
    """The result of a rank, or its failure and the time of it."""

    value: Any = None
    failure: str | None = None
    time_s: float = 0.0


def _collect(ranks: list[_Rank], timeout_s: float) -> dict[int, _Answer]:
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + timeout_s
    asks_at = time.monotonic() + _STACKS * timeout_s
    while len(answers) < len(ranks):
        waiting = [rank for rank in ranks if rank.rank not in answers]
        # Processes forked by a rank hold its pipe open, but the sentinel still shows its death.
        handles = [handle for rank in waiting for handle in (rank.reader, rank.process.sentinel)]
        ready = wait(handles, timeout=max(0.0, min(asks_at, deadline) - time.monotonic()))
        if not ready and asks_at < deadline:
            asks_at = deadline
            pids = {rank.rank: rank.process.pid for rank in waiting if rank.process.pid is not None}
            stacks.collect(pids, {rank.rank: rank.stacks for rank in waiting})  # which the ranks write there
        elif not ready:
            break
        for rank in waiting:
            if rank.reader in ready or rank.process.sentinel in ready:
                answers[rank.rank] = _answer(rank)
        if any(answer.failure is not None for answer in answers.values()):
            deadline = min(deadline, time.monotonic() + _AFTERMATH_S)
    return answers


def _results(ranks: list[_Rank], answers: dict[int, _Answer], timeout_s: float) -> list[Any]:
    # The earliest failure first; a death without an answer has time 0 and precedes all.
    failures = sorted((answer.time_s, rank, answer.failure) for rank, answer in answers.items() if answer.failure)
    missing = [rank for rank in ranks if rank.rank not in answers]
    places = "".join(f"\nrank {rank.rank} was at:\n{found}" for rank in missing if (found := _stacks(rank)))
    if failures:
        raise AssertionError("\n".join(f"rank {rank} {failure}" for _, rank, failure in failures) + places)
    if missing:
        numbers = [rank.rank for rank in missing]
        raise AssertionError(f"ranks {numbers} did not finish within {timeout_s} s and were killed.{places}")
    return [answers[rank.rank].value for rank in ranks]


def _stacks(rank: _Rank) -> str:
    try:
        return rank.stacks.read_text(errors="replace")
    except FileNotFoundError:  # killed while it started
        return ""


def _answer(rank: _Rank) -> _Answer:
    """Return the answer of a rank that is ready, or a failure if it died without one."""
    try:
        answer = rank.reader.recv_bytes() if rank.reader.poll() else b""
    except EOFError:
        answer = b""
    if not answer:
        rank.process.join(_GOODBYE_S)
        return _Answer(failure=f"died with exit code {rank.process.exitcode}")
    try:
        return pickle.loads(answer)
    except Exception as error:
        return _Answer(
            failure=f"returned what this process cannot load: {type(error).__name__}: {error}. Return instances of "
            "classes that can be imported here or that are defined at the top level of the body's file."
        )


def _run(task: _Task, writer: Connection) -> None:
    import torch  # loaded in the fork server, but perhaps not in the calling process
    import torch.distributed as tdist

    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(ValueError, RuntimeError):  # a system without the signal
        faulthandler.register(stacks.SIGNAL, file=task.stacks.open("ab"), all_threads=True)
    try:
        torch.set_num_threads(1)
        # Processes that the body starts use Python's default start method, not the one of this rank.
        multiprocessing.set_start_method(None, force=True)
        os.environ.clear()
        os.environ.update(task.environ)
        body = _load(task)
        args = pickle.loads(task.args)
        store = tdist.FileStore(task.store, task.world_size)  # pyright: ignore[reportPrivateImportUsage]  # documented
        tdist.init_process_group(
            "gloo",
            store=store,
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=_PATIENCE * task.timeout_s),
        )
        tdist.barrier()  # a rank with a short body must not exit while others still connect to it
        writer.send_bytes(pickle.dumps(_Answer(value=body(*args))))
    except BaseException:
        # Sent before the group is destroyed, so that the other ranks' resulting errors come later.
        failure = f"raised:\n{traceback.format_exc()}"
        writer.send_bytes(pickle.dumps(_Answer(failure=failure, time_s=time.monotonic())))
    else:
        with suppress(RuntimeError, ValueError):  # the body may have left the group, or another rank failed
            tdist.barrier()  # connections stay open until every rank is done
    finally:
        if tdist.is_initialized():
            tdist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when its parent is gone: a killed parent cannot end its ranks itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # a rank is always a child process
    wait([parent.sentinel])
    os._exit(1)  # `sys.exit` would end only this thread


def _load(task: _Task) -> Callable[..., Any]:
    """Return the body from its file; pytest gives test modules names that no other process can import.

    The module keeps its name, which pickles of its classes refer to in both directions.
    """
    module = sys.modules.get(task.module)  # a script's module is loaded already and must not run again
    if module is None:
        spec = importlib.util.spec_from_file_location(task.module, task.file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[task.module] = importlib.util.module_from_spec(spec)  # dataclasses look it up here
        spec.loader.exec_module(module)
    return getattr(module, task.name)
