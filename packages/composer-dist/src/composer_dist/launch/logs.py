"""Where the output of the ranks goes: local rank 0's to the console, that of the others to files.

Each rank writes into a file of its own, which torch's `TailLog` copies to wherever else the lines are wanted: files
that the user named, opened for appending, or the console.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from composer_dist.launch.args import Options
from composer_dist.launch.destinations import named_file

__all__ = ["Logs", "new_run_id"]

_CONSOLE = ""  # what torch takes for "inherit"
_STREAMS = ("stdout", "stderr")
_TAIL_INTERVAL_S = 0.1


class Logs(LogsSpecs):
    """The files of a run, below one folder, with the copies that are made of them.

    Args:
        options: What was typed.
        run_id: The name of the run's folder.
        environ: The launcher's environment.
    """

    def __init__(self, options: Options, run_id: str, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._options = options
        self._environ = environ
        self._keep = options.log_dir is not None
        if options.log_dir is None:
            self.folder = Path(tempfile.mkdtemp(prefix="composer_"))
        else:
            self.folder = Path(options.log_dir).absolute() / run_id
            self.folder.mkdir(parents=True, exist_ok=True)
        self._tails: list[TailLog] = []
        self._targets: dict[Path, TextIO] = {}

    @property
    def root_log_dir(self) -> str:
        """The folder of the run."""
        return str(self.folder)

    def rank_folder(self, attempt: str, rank: str) -> Path:
        """Return the folder of one rank's files in one attempt."""
        return self.folder / f"attempt_{attempt}" / rank

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders, tell each rank its error file, and say to torch what goes where."""
        files: dict[str, dict[int, str]] = {stream: {} for stream in _STREAMS}
        errors: dict[int, str] = {}
        for local_rank, env in envs.items():
            folder = self.rank_folder(env.get("TORCHELASTIC_RESTART_COUNT", "0"), env["RANK"])
            folder.mkdir(parents=True, exist_ok=True)
            errors[local_rank] = env["COMPOSER_ERROR_FILE"] = env["TORCHELASTIC_ERROR_FILE"] = str(
                folder / "error.json"
            )
            for stream in _STREAMS:
                on_console = local_rank == 0 and not self._options.tee
                files[stream][local_rank] = _CONSOLE if on_console else str(folder / f"{stream}.log")
        teed = files if self._options.tee else {stream: {} for stream in _STREAMS}
        return LogsDest(files["stdout"], files["stderr"], teed["stdout"], teed["stderr"], errors)

    def line_prefixes(self, envs: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
        """Return what stands before each rank's lines on the console."""
        return {local_rank: f"[rank {env['RANK']}]:" for local_rank, env in envs.items()}

    def start_copies(self, envs: Mapping[int, Mapping[str, str]]) -> None:
        """Begin to copy what the ranks other than local rank 0 write to where the user wants it."""
        prefixes = self.line_prefixes(envs)
        for stream in _STREAMS:
            raw = {
                local_rank: str(Path(env["COMPOSER_ERROR_FILE"]).with_name(f"{stream}.log"))
                for local_rank, env in envs.items()
                if local_rank > 0
            }
            for local_rank, file in raw.items():
                name = named_file(stream, self._options, envs[local_rank], self._environ)
                if name is not None:
                    self._copy({local_rank: file}, self._target(Path(name)), {local_rank: ""})
            if self._options.log_filter is not None and not self._options.tee:
                wanted = re.compile(self._options.log_filter)
                self._copy(raw, getattr(sys, stream), prefixes, wanted)

    def stop_copies(self) -> None:
        """Copy what is left and close the files."""
        for tail in self._tails:
            tail.stop()
        for target in self._targets.values():
            target.close()
        self._tails.clear()
        self._targets.clear()

    def close(self, *, failed: bool) -> str | None:
        """End the copying; return where the files are if somebody may want them, and delete them otherwise."""
        self.stop_copies()
        if failed or self._keep:
            return str(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        return None

    def _target(self, path: Path) -> TextIO:
        """Return a file that the user named, the same one for all ranks whose lines go there."""
        path = path.absolute()
        if path not in self._targets:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._targets[path] = path.open("a", encoding="utf-8", errors="replace", buffering=1)
        return self._targets[path]

    def _copy(
        self, files: dict[int, str], target: TextIO, prefixes: dict[int, str], wanted: re.Pattern[str] | None = None
    ) -> None:
        matches = (lambda line: True) if wanted is None else (lambda line: wanted.search(line) is not None)
        tail = TailLog("rank", files, target, prefixes, _TAIL_INTERVAL_S, matches)
        self._tails.append(tail.start())


def new_run_id() -> str:
    """Return a name for the folder of a run that nobody named."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
