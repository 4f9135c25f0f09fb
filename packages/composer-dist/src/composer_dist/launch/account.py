"""The account of a run's time, which the launcher of rank 0 keeps in the run folder, and the search for slow ranks."""

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_dist.attempts import write_attempt
from composer_dist.launch.report import say
from composer_dist.launch.stacks import run_folder
from composer_dist.launch.stragglers import Straggler, Stragglers
from composer_dist.progress import PARTS, Board, RankProgress

_LOOK_S = 0.5
_WRITE_S = 10.0
_LAST_WRITE_S = 5.0  # a blocked disk must not keep the launcher from its end


class Account:
    """The account of one launch.

    Args:
        launch_id: Identifies the launch among those of the run.
    """

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._named: set[tuple[int, str]] = set()
        self._number = -1
        self._board: Board | None = None
        self._envs: Mapping[int, Mapping[str, str]] = {}
        self._stragglers = Stragglers(0)
        self._folder: Path | None = None
        self._part = 0
        self._base: RankProgress | None = None  # of rank 0, when an earlier Trainer of the same process had ended
        # One clock for all attempts, so that they and the time between them add up.
        self._origin_s = time.time() - time.monotonic()
        self._started_s = self._looked_s = self._written_s = 0.0
        self._writer: threading.Thread | None = None

    def begin(self, board: Board, envs: Mapping[int, Mapping[str, str]]) -> None:
        """Start the account of an attempt."""
        self._board, self._envs = board, envs
        self._number += 1
        self._stragglers = Stragglers(len(envs))
        self._folder, self._base, self._part = None, None, 0
        self._started_s = self._looked_s = time.monotonic()
        self._written_s = 0.0

    def look(self) -> None:
        """Compare the ranks, name those that are slow, and write the account from time to time."""
        now = time.monotonic()
        if self._board is None or now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        for straggler in self._stragglers.look(self._board.read_all()):
            if (straggler.rank, straggler.cause) not in self._named:
                self._named.add((straggler.rank, straggler.cause))
                say(f"composer: warning: {straggler} (host {socket.gethostname()})", "stderr")
        self._find_folder()
        if now - self._written_s >= _WRITE_S:
            self._write("running")

    def end(self, *, has_failed: bool, is_hang: bool = False, is_stopped: bool = False) -> None:
        """Write the account of the attempt, which ends now; does nothing if it had ended before.

        Args:
            has_failed: Whether a rank has failed.
            is_hang: Whether the ranks made no progress.
            is_stopped: Whether the launcher ends the ranks because of a signal or of another node.
        """
        if self._board is None:
            return
        ending = "stopped" if is_stopped else "hang" if is_hang else "failed" if has_failed else "finished"
        self._find_folder()
        if self._writer is not None:
            self._writer.join(_LAST_WRITE_S)
        self._write(ending)
        if self._writer is not None:
            self._writer.join(_LAST_WRITE_S)
        self._board = None

    def _rank_0(self) -> RankProgress | None:
        assert self._board is not None
        local_rank = next((lr for lr, env in self._envs.items() if env["RANK"] == "0"), None)
        progress = None if local_rank is None else self._board.read(local_rank)
        return progress if progress is not None and progress.pid else None

    def _find_folder(self) -> None:
        """Read the run folder that rank 0 has noted; another Trainer of the process may have another one."""
        folder = run_folder(self._envs)
        if folder is None or folder == self._folder:
            return
        if self._folder is not None:
            self._write("finished")
            self._base, self._started_s, self._part = self._rank_0(), time.monotonic(), self._part + 1
            self._stragglers = Stragglers(len(self._envs))
        self._folder, self._written_s = folder, 0.0

    def _write(self, ending: str) -> None:
        """Write the account in a thread, since a disk that blocks must not stop the watch."""
        progress = self._rank_0()
        if self._folder is None or progress is None or (self._writer is not None and self._writer.is_alive()):
            return
        attempt, self._written_s = self._describe(progress, ending), time.monotonic()
        self._writer = threading.Thread(
            target=_write_quietly, args=(self._folder, attempt), name="composer-account", daemon=True
        )
        self._writer.start()

    def _describe(self, progress: RankProgress, ending: str) -> dict[str, Any]:
        now = time.monotonic()
        seconds = dict(progress.seconds)
        last_s = max(0.0, now - progress.time_s)
        # Rank 0 waited for a rank that was stuck or had failed, in any part.
        seconds["hang"] = last_s if ending in ("failed", "hang") else 0.0
        if not seconds["hang"]:
            seconds[progress.part] += last_s
        if self._base is not None:
            for part in PARTS:
                seconds[part] = max(0.0, seconds[part] - self._base.seconds[part])
        del seconds["start"]
        rest = max(0.0, now - self._started_s - sum(seconds.values()))  # before its own clock began, too
        return {
            "launch": self._launch_id,
            "number": self._number if not self._part else f"{self._number}.{self._part}",
            "started": self._origin_s + self._started_s,
            "updated": self._origin_s + now,
            "ending": ending,
            "first_batch": progress.first_batch,
            "batch": progress.batch,
            "seconds": {"start": rest, **seconds},
            "world_size": int(next(iter(self._envs.values())).get("WORLD_SIZE", "1")),
            "num_compared": len(self._envs),
            "ranks": self._stragglers.table(),
            "stragglers": [_plain(each) for each in self._stragglers.found],
        }


def _plain(straggler: Straggler) -> dict[str, Any]:
    return {**asdict(straggler), "factor": straggler.factor, "host": socket.gethostname()}


def _write_quietly(folder: Path, attempt: Mapping[str, Any]) -> None:
    with suppress(OSError):  # such as a full disk; the next one may succeed
        if os.path.isdir(folder):
            write_attempt(folder, attempt)
