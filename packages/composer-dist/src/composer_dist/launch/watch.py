"""The search for ranks without progress, and the report about them."""

import json
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_dist.flight_recorder import FILE as COLLECTIVES
from composer_dist.launch.args import HangTimeouts
from composer_dist.launch.report import say
from composer_dist.launch.stacks import STACK_FILE, Stack, collect, native
from composer_dist.launch.verdict import Verdict, View, decide, view
from composer_dist.progress import Board, RankProgress

_log = logging.getLogger("composer_dist.launch")
_LOOK_S = 0.2
_LONGEST_STEP_S = 2.0  # a launcher that was itself suspended must not count that time
_ANSWER_S = 2.0
# Seconds in `auto`, at least. A first batch may compile and load; a save and an evaluation depend on their size.
_FLOORS = {
    "start": 1800.0,
    "data": 180.0,
    "train": 180.0,
    "optimizer": 180.0,
    "callbacks": 600.0,
    "evaluation": 600.0,
    "checkpoint": 1800.0,
    "compile": 3600.0,
}
_FIRST_S = 1800.0
_FACTOR = 20.0


class Limits:
    """Limits of the time in each phase, which in `auto` depend on the longest time so far."""

    def __init__(self, timeouts: HangTimeouts) -> None:
        self._timeouts = timeouts
        self._longest_s: dict[str, float] = {}

    def see(self, phase: str, seconds: float) -> None:
        """Take note of a time between two marks in a phase."""
        self._longest_s[phase] = max(seconds, self._longest_s.get(phase, 0.0))

    def of(self, phase: str, *, is_first_batch: bool = False) -> float:
        """Return the limit of a phase in seconds; infinity for one without."""
        if phase == "between":
            return 0.0  # a rank that has finished does not keep the others from being stuck
        asked = self._timeouts.of(phase)
        if asked is not None:
            return asked
        limit_s = max(_FLOORS[phase], _FACTOR * self._longest_s.get(phase, 0.0))
        return max(limit_s, _FIRST_S) if is_first_batch else limit_s


class _Track:
    """The progress of one rank as the launcher sees it."""

    def __init__(self, progress: RankProgress) -> None:
        self.progress = progress
        self.first_batch = progress.batch
        self.idle_s = 0.0

    def update(self, progress: RankProgress, passed_s: float, limits: Limits) -> None:
        if progress.counter == self.progress.counter and progress.pid == self.progress.pid:
            self.idle_s += passed_s
        else:
            limits.see(self.progress.phase, self.idle_s)
            self.idle_s = 0.0
        self.progress = progress


class Watch:
    """Watches the progress of this node's ranks.

    Args:
        timeouts: The user's limits.
        folder: Where the report is written.
    """

    def __init__(self, timeouts: HangTimeouts, folder: Path) -> None:
        self._limits = Limits(timeouts)
        self._is_on = not timeouts.is_off
        self._folder = folder
        self._board: Board | None = None
        self._envs: Mapping[int, Mapping[str, str]] = {}
        self._pids: Mapping[int, int] = {}
        self._tracks: dict[int, _Track] = {}
        self._looked_s = time.monotonic()
        self._rests_until_s = 0.0

    def begin(self, board: Board, envs: Mapping[int, Mapping[str, str]], pids: Mapping[int, int]) -> None:
        """Watch the ranks of a new attempt."""
        self._board, self._envs, self._pids = board, envs, pids
        self._tracks = {}
        self._looked_s = time.monotonic()

    def look(self, exits: Mapping[int, int]) -> Verdict | None:
        """Return the verdict if no rank makes progress, given the exit codes of ranks that have ended."""
        now = time.monotonic()
        passed_s = now - self._looked_s
        if self._board is None or passed_s < _LOOK_S:
            return None
        self._looked_s = now
        self._update(min(passed_s, _LONGEST_STEP_S), exits)
        if not self._is_on or now < self._rests_until_s or not self.is_stalled(exits):
            return None
        stacks = self._collect(exits)
        if any(stack.is_compiling for stack in stacks.values()):
            idle_s = min((track.idle_s for track in self._tracks.values()), default=0.0)
            if idle_s < self._limits.of("compile"):
                self._rests_until_s = now + 60.0
                return None
        return self._judge(stacks, exits)

    def examine(self, exits: Mapping[int, int], failed: Collection[int]) -> Verdict | None:
        """Return the verdict about the other ranks after some have failed, if it names a cause.

        A rank that times out in a collective has waited for another one, and a rank that lost a connection may have
        lost it to one that ended without an error.

        Args:
            exits: The exit codes of the local ranks that have ended.
            failed: The local ranks that have failed.
        """
        if self._board is None or not self._is_on:
            return None
        self._update(0.0, exits)
        others = [lr for lr in self._envs if lr not in failed]
        if not any(lr in self._tracks for lr in others):
            return None
        stacks = self._collect({**dict.fromkeys(failed, 1), **exits})
        return self._judge(stacks, exits, others, "error: a rank has failed because of another one.")

    def _update(self, passed_s: float, exits: Mapping[int, int]) -> None:
        assert self._board is not None
        for local_rank in self._envs:
            progress = self._board.read(local_rank)
            track = self._tracks.get(local_rank)
            if track is not None and local_rank not in exits:
                track.update(progress, passed_s, self._limits)
            elif track is None and progress.pid:
                self._tracks[local_rank] = _Track(progress)

    def is_stalled(self, exits: Mapping[int, int]) -> bool:
        """Return whether every rank that trains has passed the limit of its phase; also from another thread."""
        running = [track for lr, track in list(self._tracks.items()) if lr not in exits]
        # Before the first `fit` and after the last one, a script may do anything.
        if not any(track.progress.phase not in ("start", "between") for track in running):
            return False
        return all(track.idle_s >= self._limit(track) for track in running)

    def _limit(self, track: _Track) -> float:
        progress = track.progress
        return self._limits.of(progress.phase, is_first_batch=progress.batch == track.first_batch)

    def _collect(self, exits: Mapping[int, int]) -> dict[int, Stack]:
        running = {lr: self._process(lr) for lr in self._envs if lr not in exits}
        return collect(running, {lr: Path(self._envs[lr][STACK_FILE]) for lr in running})

    def _process(self, local_rank: int) -> int:
        """Return the process that trains, which may be a child of the rank's command."""
        track = self._tracks.get(local_rank)
        return self._pids[local_rank] if track is None else track.progress.pid

    def _judge(
        self,
        stacks: Mapping[int, Stack],
        exits: Mapping[int, int],
        local_ranks: Collection[int] | None = None,
        headline: str | None = None,
    ) -> Verdict | None:
        assert self._board is not None
        collectives = self._ask(stacks)
        views = [
            view(
                int(env["RANK"]),
                self._board.read(local_rank),
                self._tracks[local_rank].idle_s if local_rank in self._tracks else math.inf,
                stacks.get(local_rank),
                collectives.get(local_rank, ()),
                exits.get(local_rank),
            )
            for local_rank, env in self._envs.items()
            if local_ranks is None or local_rank in local_ranks
        ]
        verdict = decide(views)
        world_size = int(next(iter(self._envs.values())).get("WORLD_SIZE", "1"))
        if len(self._envs) < world_size and all(each.collective is not None for each in views):
            # They may all wait for a rank of another node, whose launcher names it, or which is only slow.
            self._rests_until_s = time.monotonic() + 60.0
            return None
        if not verdict.stuck:
            return None
        self._tell(report(verdict, views, headline), stacks)
        return verdict

    def _ask(self, stacks: Mapping[int, Stack]) -> dict[int, Sequence[Mapping[str, Any]]]:
        """Return the last collectives of each rank that answers."""
        assert self._board is not None
        asked = {lr: self._board.ask(lr) for lr, stack in stacks.items() if not stack.is_suspended}
        answers: dict[int, Sequence[Mapping[str, Any]]] = {}
        deadline_s = time.monotonic() + _ANSWER_S
        while len(answers) < len(asked) and time.monotonic() < deadline_s:
            time.sleep(0.05)
            for local_rank, number in asked.items():
                path = Path(self._envs[local_rank][STACK_FILE]).with_name(COLLECTIVES)
                with suppress(OSError, ValueError):
                    answer = json.loads(path.read_text(encoding="utf-8"))
                    if answer["asked"] == number:
                        answers[local_rank] = answer["collectives"]
        return answers

    def _tell(self, lines: Sequence[str], stacks: Mapping[int, Stack]) -> None:
        """Print the report, and write it with all stacks."""
        ranks = {lr: env["RANK"] for lr, env in self._envs.items()}
        parts = ["\n".join(lines) + "\n"]
        for local_rank, stack in stacks.items():
            text = stack.text or "(it did not write its stacks)\n"
            parts.append(f"\nThe stacks of rank {ranks[local_rank]} (PID {self._process(local_rank)}):\n{text}")
            if frames := native(self._process(local_rank)):
                parts.append(f"\nThe same with native frames:\n{frames}")
        folders = [self._folder, *self._run_folders()]
        for folder in folders:
            # Not an error: the console has the report anyway.
            with suppress(OSError), (folder / "hang.txt").open("a", encoding="utf-8") as file:
                file.write("".join(parts))
        for line in lines:
            say(f"composer: {line}", "stderr")
        say(f"composer: the stacks of all ranks are in {folders[-1] / 'hang.txt'}", "stderr")

    def _run_folders(self) -> list[Path]:
        """Return the run folder, if a rank has recorded it."""
        for env in self._envs.values():
            with suppress(OSError):
                return [Path(Path(env[STACK_FILE]).with_name("run_folder").read_text(encoding="utf-8"))]
        return []


def report(verdict: Verdict, views: Sequence[View], headline: str | None = None) -> list[str]:
    """Return the lines of the report."""
    idle_s = [each.idle_s for each in views if each.exit_code is None and each.idle_s < math.inf]
    lines = [headline or f"error: no rank has made progress for {min(idle_s, default=0.0):.0f} s."]
    if verdict.cause:
        lines.append(f"{verdict.cause}.")
    lines += [f"stuck: rank {rank} {what}." for rank, what in sorted(verdict.stuck.items())]
    lines += [f"waiting for it: rank {rank} {what}." for rank, what in sorted(verdict.waiting.items())]
    return lines
