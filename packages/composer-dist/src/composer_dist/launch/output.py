"""The output of the ranks: local rank 0's goes to the console, that of the others to files.

Each rank writes to files of its own. torch's `TailLog` copies their lines to the files that the user named, opened for
appending, or to the console.
"""

import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from composer_dist.launch.args import CannotStartError, Options
from composer_dist.launch.stacks import STACK_FILE
from composer_dist.launch.topology import named_file

_CONSOLE = ""  # torch's value for an inherited stream
_STREAMS = ("stdout", "stderr")
_TAIL_INTERVAL_S = 0.1
_STOP_TIMEOUT_S = 2.0
_CUT_TIMEOUT_S = 1.0

_log = logging.getLogger("composer_dist.launch")


@dataclass(frozen=True, slots=True)
class _Copy:
    """A running copy from one file or several to one target."""

    tail: TailLog
    is_cut: threading.Event
    files: list[str]


class Logs(LogsSpecs):
    """The log files of a run in one folder, and the copies of their lines."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._options = options
        self._environ = environ
        self._keep = options.log_dir is not None
        self._is_cut = False
        try:
            if options.log_dir is None:
                self.folder = Path(tempfile.mkdtemp(prefix="composer_"))
            else:
                name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
                self.folder = Path(options.log_dir).absolute() / name
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            place = "a temporary folder" if options.log_dir is None else f"--log-dir={options.log_dir!r}"
            raise CannotStartError(
                f"{place} for the logs cannot be made: {error}. Give a --log-dir in which files can be written."
            ) from error
        self._copies: list[_Copy] = []
        self._targets: dict[Path, TextIO] = {}

    @property
    def root_log_dir(self) -> str:
        """The folder of the run."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the folders, set each rank's error file, and return the destinations of all streams."""
        files: dict[str, dict[int, str]] = {stream: {} for stream in _STREAMS}
        errors: dict[int, str] = {}
        for local_rank, env in envs.items():
            folder = self.folder / f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}" / env["RANK"]
            folder.mkdir(parents=True, exist_ok=True)
            errors[local_rank] = env["COMPOSER_ERROR_FILE"] = env["TORCHELASTIC_ERROR_FILE"] = str(
                folder / "error.json"
            )
            env[STACK_FILE] = str(folder / "stacks.txt")
            for stream in _STREAMS:
                on_console = local_rank == 0 and not self._options.tee
                files[stream][local_rank] = _CONSOLE if on_console else str(folder / f"{stream}.log")
        return LogsDest(files["stdout"], files["stderr"], {}, {}, errors)  # torch's copies could block the end

    def open_targets(self, envs: Mapping[int, Mapping[str, str]]) -> None:
        """Open the files that the user named, before any process starts, so that an error leaves none running."""
        for stream in _STREAMS:
            for env in envs.values():
                name = named_file(stream, self._options, env, self._environ)
                if name is None:
                    continue
                try:
                    self._target(Path(name))
                except OSError as error:
                    raise CannotStartError(
                        f"--{stream}={getattr(self._options, stream)!r}: {name!r} for rank {env['RANK']} cannot be "
                        f"opened: {error}. Give a path at which files can be written."
                    ) from error

    def start_copies(self, envs: Mapping[int, Mapping[str, str]]) -> None:
        """Start copying the ranks' output to the user's files and the console."""
        prefixes = {local_rank: f"[rank {env['RANK']}]:" for local_rank, env in envs.items()}
        wanted = re.compile(self._options.log_filter or "")
        is_on_console = self._options.tee or self._options.log_filter is not None
        for stream in _STREAMS:
            raw = {
                local_rank: str(Path(env["COMPOSER_ERROR_FILE"]).with_name(f"{stream}.log"))
                for local_rank, env in envs.items()
                if local_rank > 0 or self._options.tee
            }
            for local_rank, file in raw.items():
                name = named_file(stream, self._options, envs[local_rank], self._environ)
                if name is not None:
                    self._copy({local_rank: file}, self._target(Path(name)), {local_rank: ""}, re.compile(""))
            if is_on_console:  # --tee shows all lines, --log-filter only matching ones
                everything = re.compile("") if self._options.tee else wanted
                self._copy(raw, getattr(sys, stream), prefixes, everything)

    def flush(self) -> None:
        """Flush the user's files so that readers see new lines; a flush per line would slow the copies down."""
        for target in self._targets.values():
            with suppress(OSError, ValueError):  # a full disk must not fail the run
                target.flush()

    def stop_copies(self) -> None:
        """Copy the remaining output for at most two seconds, and close the files."""
        # TailLog stops at the end of its file, which it never reaches if a process still writes.
        stops = [(threading.Thread(target=copy.tail.stop, daemon=True), copy) for copy in self._copies]
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for thread, _ in stops:
            thread.start()  # in parallel, so that one deadline holds for all
        for thread, copy in stops:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._is_cut = True
                copy.is_cut.set()
                thread.join(_CUT_TIMEOUT_S)
                _log.warning("Not all output was copied in %g s; it is in %s", _STOP_TIMEOUT_S, ", ".join(copy.files))
        for target in self._targets.values():
            with suppress(OSError, ValueError):
                target.close()
        self._copies.clear()
        self._targets.clear()

    def close(self, *, failed: bool) -> str | None:
        """Stop the copies; return the folder if it is kept, and delete it otherwise."""
        self.stop_copies()
        if failed or self._keep or self._is_cut:
            return str(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        return None

    def _target(self, path: Path) -> TextIO:
        """Return a file that the user named; ranks with the same file share it."""
        path = path.absolute()  # different names of one file must share one handle
        if path not in self._targets:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._targets[path] = path.open("a", encoding="utf-8", errors="replace")
        return self._targets[path]

    def _copy(self, files: dict[int, str], target: TextIO, prefixes: dict[int, str], wanted: re.Pattern[str]) -> None:
        is_cut = threading.Event()

        def matches(line: str) -> bool:
            if is_cut.is_set():
                raise TimeoutError("the copying took too long")  # the only way to stop TailLog early
            return wanted.search(line) is not None

        tail = TailLog("rank", files, target, prefixes, _TAIL_INTERVAL_S, matches)
        self._copies.append(_Copy(tail.start(), is_cut, list(files.values())))
