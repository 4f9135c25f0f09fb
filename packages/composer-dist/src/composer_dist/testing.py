"""A function in several processes, for tests of what ranks do together."""

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
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
from typing import Any

__all__ = ["run_ranks"]

# Each optimizer made first in a process imports torch._dynamo, which takes a second or more.
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "composer_dist.dist"]
# It takes as long, with all that it looks for; the ranks most likely need it if the process that asks first has it.
_PRELOADED_AFTER = ["torchmetrics"]
_GOODBYE_S = 5.0  # how long a rank may take to end, once it has nothing more to say
_PATIENCE = 0.75  # which part of its time a collective waits, so that its own complaint is heard before the end
_STACKS_S = 1.0  # how long before it is killed a rank tells where its threads are
_TELL = signal.SIGUSR2  # has a process write where its threads are
_AFTERMATH_S = 0.3  # how long the others' complaints are waited for, once a rank has failed


def run_ranks(
    body: Callable[..., Any], *args: Any, store: str | os.PathLike[str], world_size: int = 2, timeout_s: float = 60
) -> list[Any]:
    """Call a function once in each of several processes, joined by gloo, and return what each of them returned.

    Each process computes with one thread, and has this process's environment of now with the variables `RANK`,
    `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` and `NODE_RANK` of a single node. They are forked from a server that
    has imported torch, so that the first call takes some seconds and each further one about one. They end with this
    process, also when it is killed. A script that calls this needs `if __name__ == "__main__":`.

    Args:
        body: A function at the top level of a file, which each process loads anew: a test module need not be
            importable. What it does is limited to CPUs; it may start processes of its own, such as a `DataLoader`'s
            workers.
        *args: For the body. They travel as pickles, as does what it returns; tensors are copied. Their classes may
            be those of the body's file.
        store: Where the ranks meet: the path of a file that does not exist, such as `tmp_path / "store"`.
        world_size: How many processes.
        timeout_s: Seconds until the processes are killed; a collective gives up, and says so, after three quarters.

    Returns:
        The results in rank order.

    Raises:
        ValueError: If `body` is not at the top level of a file, or if `store` exists.
        AssertionError: If a rank raised, died or did not finish, with that rank's traceback, its exit code, or where
            its threads were just before the end.
    """
    if Path(store).exists():
        raise ValueError(f"store={str(store)!r} exists: ranks of an earlier run met there. Choose another name.")
    if "." in body.__qualname__:
        raise ValueError(f"body={body!r} is not at the top level of a file. Define it there, and pass what it needs.")
    call = _Call(body.__module__, inspect.getfile(body), body.__name__, pickle.dumps(args))
    environ = dict(os.environ)  # the server has that of the first call
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *(name for name in _PRELOADED_AFTER if name in sys.modules)])
    ranks: list[_Rank] = []
    notes = tempfile.TemporaryDirectory(prefix="ranks-")
    try:
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            stacks = Path(notes.name, f"rank{rank}")
            settings = _Settings(rank, world_size, str(store), timeout_s, environ, stacks)
            # Not daemonic, since those may not start processes.
            process = context.Process(target=_run, args=(settings, call, writer), daemon=False)
            process.start()
            writer.close()  # the process has its own end, so that its death is seen here
            ranks.append(_Rank(rank, process, reader, stacks))
        results = _collect(ranks, timeout_s)
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
class _Settings:
    """What a process must know to take its place."""

    rank: int
    world_size: int
    store: str
    timeout_s: float
    environ: dict[str, str]
    stacks: Path  # where the rank writes what its threads do shortly before its time is over


@dataclass(frozen=True, slots=True)
class _Call:
    """The body, by where it stands, and its arguments, which may need the body's module to be loaded."""

    module: str
    file: str
    name: str
    args: bytes


@dataclass(frozen=True, slots=True)
class _Rank:
    """A started process and the pipe through which it answers."""

    rank: int
    process: BaseProcess
    reader: Connection
    stacks: Path


@dataclass(frozen=True, slots=True)
class _Answer:
    """How a rank ended: its result, or what went wrong and when."""

    value: Any = None
    failure: str | None = None
    time_s: float = 0.0


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    """Return the results in rank order, or raise for the rank that failed first."""
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(ranks):
        waiting = [rank for rank in ranks if rank.rank not in answers]
        # Processes that a rank forked hold its pipe open; its sentinel tells its death all the same.
        handles = [handle for rank in waiting for handle in (rank.reader, rank.process.sentinel)]
        ready = wait(handles, timeout=max(0.0, deadline - time.monotonic()))
        for rank in waiting:
            if rank.reader in ready or rank.process.sentinel in ready:
                answers[rank.rank] = _answer(rank)
        failed = any(answer.failure is not None for answer in answers.values())
        if failed and ready:
            deadline = min(deadline, time.monotonic() + _AFTERMATH_S)
        if not ready:
            break
    _raise_failures(answers)
    missing = sorted(rank.rank for rank in ranks if rank.rank not in answers)
    if missing:
        stacks = "".join(f"\nrank {rank.rank} was at:\n{_stacks(rank)}" for rank in ranks if rank.rank in missing)
        raise AssertionError(f"ranks {missing} did not finish within {timeout_s} s and were killed.{stacks}")
    return [answers[rank.rank].value for rank in ranks]


def _stacks(rank: _Rank) -> str:
    """Return where a rank's threads were, if it lived to tell, and then those of the processes that it forked."""
    for forked in _children_of(rank.process.pid):
        with suppress(OSError):
            os.kill(forked, _TELL)
    time.sleep(_AFTERMATH_S)
    try:
        return rank.stacks.read_text(errors="replace")
    except OSError:
        return "nowhere that it told of\n"


def _children_of(pid: int | None) -> list[int]:
    """Return the processes that a process has started, where the system tells."""
    listed: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            listed += map(int, children.read_text().split())
    return listed


def _answer(rank: _Rank) -> _Answer:
    """Return what a rank that is ready has sent, or that it died without a word."""
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
            "classes that can be imported here or that stand at the top level of the body's file."
        )


def _raise_failures(answers: dict[int, _Answer]) -> None:
    """Raise if a rank failed; the first one's failure is the cause of the others', and a silent death of all."""
    failures = [(answer.time_s, rank, answer.failure) for rank, answer in answers.items() if answer.failure is not None]
    if failures:
        raise AssertionError("\n".join(f"rank {rank} {failure}" for _, rank, failure in sorted(failures)))


def _run(settings: _Settings, call: _Call, writer: Connection) -> None:
    """Take a rank's place in the group, call the body and send what came of it."""
    import torch  # the server has imported it; the process that asks need not
    import torch.distributed as tdist

    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A thread of C writes them, whoever holds Python's lock. What this rank forks, such as workers, can be asked.
    stacks = settings.stacks.open("a")
    faulthandler.dump_traceback_later(max(settings.timeout_s - _STACKS_S, settings.timeout_s / 2), file=stacks)
    faulthandler.register(_TELL, file=stacks)
    try:
        torch.set_num_threads(1)
        # Processes that the body starts do so in Python's default way, not the one in which this rank was started.
        multiprocessing.set_start_method(None, force=True)
        os.environ.clear()
        os.environ.update(settings.environ | _variables(settings))
        body = _load(call)
        args = pickle.loads(call.args)
        store = tdist.FileStore(settings.store, settings.world_size)  # pyright: ignore[reportPrivateImportUsage]  # documented
        tdist.init_process_group(
            "gloo",
            store=store,
            rank=settings.rank,
            world_size=settings.world_size,
            timeout=timedelta(seconds=_PATIENCE * settings.timeout_s),
        )
        tdist.barrier()  # a short body would be gone while the others still connect to this rank
        writer.send_bytes(pickle.dumps(_Answer(value=body(*args))))
    except BaseException:
        # Sent before the group is destroyed, so that the others' complaints about it are later.
        failure = f"raised:\n{traceback.format_exc()}"
        writer.send_bytes(pickle.dumps(_Answer(failure=failure, time_s=time.monotonic())))
    else:
        with suppress(RuntimeError, ValueError):  # a body may have left the group, or another rank failed
            tdist.barrier()  # nobody's connections close while others still use theirs
    finally:
        if tdist.is_initialized():
            tdist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when the one that asked for it is gone, which a kill gives no chance to end its ranks."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a rank
    wait([parent.sentinel])
    os._exit(1)


def _variables(settings: _Settings) -> dict[str, str]:
    """Return what a launcher would have set on a single node."""
    rank, world_size = str(settings.rank), str(settings.world_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
        "NODE_RANK": "0",
    }


def _load(call: _Call) -> Callable[..., Any]:
    """Return the body from its file; pytest gives test modules names that no other process can import.

    The module keeps its name, by which pickles refer to its classes here and in the process that asked.
    """
    module = sys.modules.get(call.module)  # a script's own is here already, and must not run as such again
    if module is None:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[call.module] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
        spec.loader.exec_module(module)
    return getattr(module, call.name)
