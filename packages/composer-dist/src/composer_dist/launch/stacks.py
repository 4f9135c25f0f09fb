"""The Python stacks of the ranks on request, and what each rank is doing according to its stack.

The startup hook of each rank registers a signal at which `faulthandler` writes the stacks of all threads, even while
the rank waits in native code or never returns to the loop.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from composer_dist.launch.guardian import process_state

STACK_FILE = "COMPOSER_STACK_FILE"
"""The variable with the file to which a rank writes its stacks."""
SIGNAL = getattr(signal, "SIGRTMIN", 34) + 8
"""The signal at which a rank writes its stacks. `hook/sitecustomize.py` has it, too."""
_WRITE_TIMEOUT_S = 3.0
_NATIVE_TIMEOUT_S = 10.0
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/")
_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<frozen|/composer(_\w+)?/(\w+/)*\w+\.py$")
_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class Stack:
    """The state and the stack of a process.

    Attributes:
        state: Linux's letter for its state, such as `'T'` for suspended; `None` if unknown.
        frames: The stack of the main thread, innermost frame first. Empty if the process did not write it.
        text: All stacks of the process and of its children as written.
        workers: Innermost frames of its child processes that wrote theirs, such as workers of a dataloader.
    """

    state: str | None
    frames: Sequence[Frame]
    text: str
    workers: Sequence[tuple[int, Frame]] = ()

    @property
    def is_suspended(self) -> bool:
        """Return whether the process is stopped by SIGSTOP or a debugger."""
        return self.state in ("T", "t")

    @property
    def is_compiling(self) -> bool:
        """Return whether a compiler runs, which may take long."""
        return any(part in frame.file for frame in self.frames for part in _COMPILERS)

    @property
    def collective(self) -> str | None:
        """The collective operation in which the main thread waits, or `None`."""
        for frame in self.frames:
            if frame.file.endswith("/composer_dist/ddp.py"):  # waits for collectives that it has begun before
                return "the collectives of data parallelism"
            if any(part in frame.file for part in _COLLECTIVES) and "/checkpoint/" not in frame.file:
                name = frame.function.rpartition(".")[2]
                return name if name not in ("wrapper", "_wait", "wait") else self._outer_collective(frame)
            if frame.function == "_engine_run_backward":
                return "the collectives of the backward pass"
            if not _is_waiting_inside(frame):
                return None
        return None

    def _outer_collective(self, inner: Frame) -> str:
        for frame in self.frames[self.frames.index(inner) + 1 :]:
            if any(part in frame.file for part in _COLLECTIVES) and frame.function != "wrapper":
                return frame.function
        return inner.function

    @property
    def own_frame(self) -> Frame | None:
        """The innermost frame outside Python's library, installed packages and this one."""
        own = (frame for frame in self.frames if not _LIBRARIES.search(frame.file))
        return next(own, self.frames[0] if self.frames else None)

    @property
    def waits_for_worker(self) -> bool:
        """Return whether the main thread waits for a worker of a dataloader."""
        return any(
            frame.file.endswith("/torch/utils/data/dataloader.py") and frame.function.endswith(("_get_data", "_data"))
            for frame in self.frames
        )

    @property
    def waits_for_lock(self) -> bool:
        """Return whether the innermost frame waits for another thread."""
        return bool(self.frames) and self.frames[0].file.endswith(("/threading.py", "/queue.py"))


def _is_waiting_inside(frame: Frame) -> bool:
    """Return whether a frame may be inside a collective, as the wait for its result is."""
    return frame.file.endswith(("/torch/_ops.py", "/torch/utils/_contextlib.py", "/contextlib.py"))


def collect(pids: Mapping[int, int], files: Mapping[int, Path]) -> dict[int, Stack]:
    """Ask processes for their stacks, and return those, by local rank.

    Args:
        pids: The process of each rank.
        files: The file to which each writes.
    """
    asked: dict[int, tuple[int, list[int]]] = {}
    states = {key: process_state(pid) for key, pid in pids.items()}
    for key, pid in pids.items():
        start = _size(files[key])
        # Others first: they share the file, and the rank's own stack then ends it.
        family = [each for each in (*_children(pid), pid) if _catches(each)]
        asked[key] = start, family
        for each in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, SIGNAL)
                _await_growth(files[key], states[key])
    return {key: _read(files[key], start, family, pids[key], states[key]) for key, (start, family) in asked.items()}


def of_crash(file: Path) -> Stack:
    """Return the stack of a process that crashed, as far as it wrote one."""
    return _read(file, 0, [0], 0, None)


def run_folder(envs: Mapping[int, Mapping[str, str]]) -> Path | None:
    """Return the run folder, if one of the ranks with these variables has recorded it next to its stacks."""
    for env in envs.values():
        with suppress(OSError):
            return Path(Path(env[STACK_FILE]).with_name("run_folder").read_text(encoding="utf-8"))
    return None


def native(pids: Collection[int]) -> dict[int, str]:
    """Return the stacks with native frames of the processes that py-spy may read, if it is installed."""
    tool = shutil.which("py-spy")
    if tool is None or not pids:
        return {}

    def dump(pid: int) -> str:
        with suppress(OSError, subprocess.SubprocessError):
            command = [tool, "dump", "--native", "--pid", str(pid)]
            return subprocess.run(command, capture_output=True, text=True, timeout=_NATIVE_TIMEOUT_S, check=True).stdout
        return ""

    with ThreadPoolExecutor(len(pids)) as pool:  # at the same time, since each takes a second
        return {pid: text for pid, text in zip(pids, pool.map(dump, pids), strict=True) if text}


def _await_growth(file: Path, state: str | None) -> None:
    """Wait until a process has written its stack; a suspended one never does."""
    before, deadline_s = _size(file), time.monotonic() + (0.0 if state in ("T", "t") else _WRITE_TIMEOUT_S)
    size = before
    while time.monotonic() < deadline_s:
        time.sleep(0.02)
        now = _size(file)
        if now > before and now == size:
            return
        size = now


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(file: Path, start: int, family: Sequence[int], pid: int, state: str | None) -> Stack:
    try:
        text = file.read_bytes()[start:].decode(errors="replace")
    except OSError:
        text = ""
    stacks = list(_main_threads(text))
    # One for each process that was asked, in that order, if all of them have written theirs.
    if len(stacks) != len(family):
        return Stack(state, stacks[-1] if stacks and pid in family else (), text)
    found = dict(zip(family, stacks, strict=True))
    workers = [(each, frames[0]) for each, frames in found.items() if each != pid and frames]
    return Stack(state, found.get(pid, ()), text, workers)


def _main_threads(text: str) -> Iterable[list[Frame]]:
    """Yield the main thread's stack of each process in a text: the one that did not begin in `threading`."""
    for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)|^(?=(?:Current thread|Thread) 0x)", text):
        frames = [
            Frame(match["file"], int(match["line"]), match["function"])
            for line in block.splitlines()
            if (match := _FRAME.match(line))
        ]
        if frames and not (frames[-1].file.endswith("threading.py") and "_bootstrap" in frames[-1].function):
            yield frames


def _catches(pid: int) -> bool:
    """Return whether a process handles the signal, whose default action would end it."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []
