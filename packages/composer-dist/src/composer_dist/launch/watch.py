"""The search for ranks without progress, and the report about them."""

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from composer_dist.flight_recorder import FILE as COLLECTIVES
from composer_dist.launch.args import HangTimeouts
from composer_dist.launch.nodes import Nodes, all_have_seen, is_stalled_everywhere
from composer_dist.launch.report import join_ranks, say
from composer_dist.launch.stacks import STACK_FILE, Stack, collect, native, of_crash, run_folder
from composer_dist.launch.verdict import NOT_BEGUN, Verdict, View, decide, describe_call, describe_place, left, view
from composer_dist.progress import Board, RankProgress

_log = logging.getLogger("composer_dist.launch")
_LOOK_S = 0.2
_LONGEST_STEP_S = 2.0  # a launcher that was itself suspended must not count that time
_ANSWER_S = 2.0
_NODES_ANSWER_S = 12.0
_ERRORS_S = 3.0
_NODES_SEE_S = 3.0
_MOST_CHARACTERS = 64 * 1024  # of one rank's stacks, in what other nodes read
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
_REST_S = 60.0
_NODES_HEARD_S = 6.0
_NEVER_HEARD = "is on a node whose launcher has never reported"
_WAITING = "waiting for it: "
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
        self._nodes: Nodes | None = None
        self._answered = 0
        self._over_since_s = 0.0

    def begin(
        self,
        board: Board,
        envs: Mapping[int, Mapping[str, str]],
        pids: Mapping[int, int],
        nodes: Nodes | None = None,
    ) -> None:
        """Watch the ranks of a new attempt."""
        self.close()
        self._board, self._envs, self._pids, self._nodes = board, envs, pids, nodes
        self._tracks = {}
        self._looked_s = time.monotonic()
        self._answered = 0

    def close(self, exits: Mapping[int, int] | None = None) -> None:
        """End the exchange with other nodes, which still learn how the ranks have ended."""
        if self._nodes is not None:
            if exits is not None:
                self._tell_nodes(exits)
            self._nodes.close()
            self._nodes = None

    def look(self, exits: Mapping[int, int]) -> Verdict | None:
        """Return the verdict if no rank makes progress, given the exit codes of ranks that have ended."""
        now = time.monotonic()
        passed_s = now - self._looked_s
        if self._board is None or passed_s < _LOOK_S:
            return None
        self._looked_s = now
        self._update(min(passed_s, _LONGEST_STEP_S), exits)
        if self._nodes is not None:
            self._tell_nodes(exits)
            if self._nodes.verdict is not None:
                return self._take(self._nodes)
        if not self._is_on or now < self._rests_until_s or not self._is_stalled_anywhere(exits):
            return None
        return self._judge(exits)

    def examine(self, exits: Mapping[int, int], failed: Collection[int], *, waited: bool) -> Verdict | None:
        """Return the verdict about the other ranks after some have failed, if it names a cause.

        A rank that times out in a collective has waited for another one, and a rank that lost a connection may have
        lost it to one that ended without an error.

        Args:
            exits: The exit codes of the local ranks that have ended.
            failed: The local ranks that have failed.
            waited: Whether the first of them has waited for another one.
        """
        if self._board is None or not self._is_on or not (waited or self._nodes):
            return None
        self._update(0.0, exits)
        has_others = any(lr in self._tracks for lr in self._envs if lr not in failed)
        if self._nodes is not None:
            self._nodes.read_all(True)
            self._tell_nodes(exits)
            is_answered = self._nodes.refresh()
            if is_answered and self._nodes.verdict is not None:
                return self._take(self._nodes)
            waited |= is_answered and self._has_left_early()
            has_others |= is_answered
        if not (waited and has_others):
            return None
        return self._judge(exits, failed, "error: a rank has failed because of another one.")

    def compare_with_aborted(
        self, aborted: int, exits: Mapping[int, int], error_of: Callable[[int], Mapping[str, Any] | None]
    ) -> str | None:
        """Return what the ranks called, if Gloo can have aborted a rank, or `None`.

        It aborts a rank that gets more data than the shape of its tensor has room for, in a thread of its own: the
        main thread need not have come to the collective's end yet.

        Args:
            aborted: The local rank.
            exits: The exit codes of the local ranks that have ended.
            error_of: Returns the exception that a local rank has recorded by now.
        """
        stack = of_crash(Path(self._envs[aborted][STACK_FILE]))
        if self._board is None:
            return None
        running = {lr: Stack(None, (), "") for lr in self._envs if lr not in exits}
        calls = {lr: list(found) for lr, found in self._ask(running).items()}
        deadline_s = time.monotonic() + _ERRORS_S
        while True:
            # Another rank may have lost its connection to this one meanwhile, and may still be recording that.
            calls |= {lr: list(error.get("collectives", ())) for lr in self._envs if (error := error_of(lr))}
            if any(calls.values()) or time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_S)
        if stack.collective is None and not any(
            found[-1]["name"].startswith("gloo:") for found in calls.values() if found
        ):
            return None
        said = [
            f"rank {self._envs[lr]['RANK']} called {describe_call(found[-1])} {describe_place(self._board.read(lr))}"
            for lr, found in sorted(calls.items())
            if found
        ]
        rank, place = self._envs[aborted]["RANK"], describe_place(self._board.read(aborted))
        others = f" The others: {'; '.join(said)}." if said else ""
        where = f"in {stack.collective} {place}. Gloo does" if stack.collective else f"{place}. Gloo may do"
        return f"rank {rank} was aborted {where} so if another rank calls a collective of another shape.{others}"

    def _take(self, nodes: Nodes) -> Verdict:
        """Print and return the verdict of another node's launcher."""
        assert nodes.verdict is not None
        for line in nodes.verdict["lines"]:
            say(f"composer: {line}", "stderr")
        say(f"composer: the stacks of all ranks are on the node of rank {nodes.verdict['by']}", "stderr")
        nodes.refresh()  # so that the other launcher need not wait
        return Verdict({int(rank): what for rank, what in nodes.verdict["stuck"].items()}, {})

    def _tell_nodes(self, exits: Mapping[int, int]) -> None:
        """Tell the other nodes where the ranks are, and answer their requests for stacks."""
        assert self._nodes is not None
        nodes, is_over = self._nodes, self._is_over(exits)
        message = {"is_over": is_over, "is_training": self._is_training(exits), "answered": self._answered}
        nodes.tell(message | {"views": [asdict(each) for each in self._views({}, {}, exits)]})
        if nodes.asked > self._answered:
            number = nodes.asked
            stacks = self._collect(exits)
            views = self._views(stacks, self._ask(stacks), exits)
            texts = {rank: text[:_MOST_CHARACTERS] for rank, text in self._texts(stacks).items()}
            nodes.answer(number, {"views": [asdict(each) for each in views], "texts": texts, "is_over": is_over})
            self._answered = number
            nodes.tell(message | {"answered": number, "views": [asdict(each) for each in self._views({}, {}, exits)]})

    def _remembered(self) -> list[View]:
        """Return the ranks of other nodes as far as their launchers' last messages describe them."""
        assert self._nodes is not None
        return [View.from_json(each) for node in self._nodes.others() for each in node.message["views"]]

    def _has_left_early(self) -> bool:
        """Return whether a rank of another node has ended without an error while others still trained."""
        return any(each.exit_code == 0 and each.where != NOT_BEGUN for each in left(self._remembered()))

    def _is_stalled_anywhere(self, exits: Mapping[int, int]) -> bool:
        """Return whether no rank of any node makes progress, as far as this launcher decides it."""
        if self._nodes is None:
            return self.is_stalled(exits)
        is_over = self._is_over(exits)
        if not self._nodes.has_rank_0:
            # The launcher of rank 0 decides. Without it, this one does.
            (first, *_) = [*self._nodes.others(), None]
            is_alone = self._nodes.is_cut_off or (first is not None and first.is_silent)
            return is_alone and self.is_stalled(exits)
        if not is_over or not self._nodes.reads_all:
            self._over_since_s = time.monotonic()
            self._nodes.read_all(is_over)
            return False
        # First all others have the time to write a message.
        if self._nodes.unheard() and time.monotonic() - self._over_since_s < _NODES_HEARD_S:
            return False
        own = {"is_over": is_over, "is_training": self._is_training(exits)}
        return is_stalled_everywhere(self._nodes.others(), own)

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
        return self._is_training(exits) and self._is_over(exits)

    def _is_training(self, exits: Mapping[int, int]) -> bool:
        # Before the first `fit` and after the last one, a script may do anything.
        return any(track.progress.phase not in ("start", "between") for track in self._running(exits))

    def _is_over(self, exits: Mapping[int, int]) -> bool:
        return all(track.idle_s >= self._limit(track) for track in self._running(exits))

    def _running(self, exits: Mapping[int, int]) -> list[_Track]:
        return [track for lr, track in list(self._tracks.items()) if lr not in exits]

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
        self, exits: Mapping[int, int], failed: Collection[int] = (), headline: str | None = None
    ) -> Verdict | None:
        """Collect what there is about all ranks, except those that have failed, and report who is stuck."""
        nodes = self._nodes
        asked = nodes is not None and nodes.ask()
        if nodes is not None:
            self._answered = nodes.asked
        stacks = self._collect({**dict.fromkeys(failed, 1), **exits})
        views = self._views(stacks, self._ask(stacks), exits, failed)
        texts = self._texts(stacks)
        if nodes is not None:
            answers = self._await_answers(nodes, exits) if asked else {}
            # If the store is only slow, the other nodes are not known.
            is_known = asked or nodes.is_cut_off
            if headline is None and not (is_known and _are_over(answers)):
                return None
            views += self._views_of_others(answers)
            for answer in answers.values():
                texts |= {int(rank): text for rank, text in answer["texts"].items()}
        if headline is None and self._may_compile(views):
            self._rests_until_s = time.monotonic() + _REST_S
            return None
        verdict = decide(views)
        if not verdict.stuck:
            return None
        lines = report(verdict, views, headline)
        if nodes is not None:
            self._tell_verdict(nodes, verdict, lines, exits)
        self._tell(lines, texts)
        return verdict

    def _may_compile(self, views: Sequence[View]) -> bool:
        idle_s = min((each.idle_s for each in views), default=0.0)
        return idle_s < self._limits.of("compile") and any(each.is_compiling for each in views)

    def _views(
        self,
        stacks: Mapping[int, Stack],
        collectives: Mapping[int, Sequence[Mapping[str, Any]]],
        exits: Mapping[int, int],
        failed: Collection[int] = (),
    ) -> list[View]:
        assert self._board is not None
        return [
            view(
                int(env["RANK"]),
                self._board.read(local_rank),
                self._tracks[local_rank].idle_s if local_rank in self._tracks else math.inf,
                stacks.get(local_rank),
                collectives.get(local_rank, ()),
                exits.get(local_rank),
            )
            for local_rank, env in self._envs.items()
            if local_rank not in failed
        ]

    def _await_answers(self, nodes: Nodes, exits: Mapping[int, int]) -> dict[int, dict[str, Any]]:
        """Return what the other launchers answer in time, by the first rank of the node."""
        deadline_s = time.monotonic() + _NODES_ANSWER_S
        while time.monotonic() < deadline_s and nodes.refresh():
            if nodes.asked > self._answered:
                self._tell_nodes(exits)  # another launcher asks at the same time
            if all(node.is_silent or min(node.ranks) in nodes.answers for node in nodes.others()):
                break
            time.sleep(_LOOK_S)
        return dict(nodes.answers)

    def _views_of_others(self, answers: Mapping[int, Mapping[str, Any]]) -> list[View]:
        assert self._nodes is not None
        found = [View.from_json(each) for answer in answers.values() for each in answer["views"]]
        known = {each.rank for each in found}
        for each in self._remembered():
            if each.rank not in known:
                unknown = replace(each, is_unknown=each.exit_code is None, doing="is on a node that does not answer,")
                found.append(unknown)
        known |= {each.rank for each in found}
        return found + [
            View(rank=rank, idle_s=math.inf, where="", phase="start", batch=0, is_unknown=True, doing=_NEVER_HEARD)
            for rank in self._nodes.unheard()
            if rank not in known
        ]

    def _tell_verdict(self, nodes: Nodes, verdict: Verdict, lines: Sequence[str], exits: Mapping[int, int]) -> None:
        """Tell the other launchers, and give them the time to read it before ranks end because of it."""
        told = [line for line in lines if not line.startswith(_WAITING)]
        by = min(int(env["RANK"]) for env in self._envs.values())
        nodes.announce({"by": by, "lines": told, "stuck": {str(rank): what for rank, what in verdict.stuck.items()}})
        deadline_s = time.monotonic() + _NODES_SEE_S
        while time.monotonic() < deadline_s and nodes.refresh() and not all_have_seen(nodes.others()):
            self._tell_nodes(exits)
            time.sleep(_LOOK_S)

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

    def _texts(self, stacks: Mapping[int, Stack]) -> dict[int, str]:
        """Return the stacks of each rank as text."""
        texts: dict[int, str] = {}
        frames = native([self._process(local_rank) for local_rank in stacks])
        for local_rank, stack in stacks.items():
            rank, pid = int(self._envs[local_rank]["RANK"]), self._process(local_rank)
            own = stack.text or "(it did not write its stacks)\n"
            texts[rank] = f"\nThe stacks of rank {rank} (PID {pid}):\n{own}"
            if pid in frames:
                texts[rank] += f"\nThe same with native frames:\n{frames[pid]}"
        return texts

    def _tell(self, lines: Sequence[str], texts: Mapping[int, str]) -> None:
        """Print the report, and write it with all stacks."""
        folders = [folder for folder in (self._folder, run_folder(self._envs)) if folder is not None]
        text = "".join(["\n".join(lines), "\n", *(text for _, text in sorted(texts.items()))])
        for folder in folders:
            # Not an error: the console has the report anyway.
            with suppress(OSError), (folder / "hang.txt").open("a", encoding="utf-8") as file:
                file.write(text)
        for line in lines:
            say(f"composer: {line}", "stderr")
        say(f"composer: the stacks of all ranks are in {folders[-1] / 'hang.txt'}", "stderr")


def report(verdict: Verdict, views: Sequence[View], headline: str | None = None) -> list[str]:
    """Return the lines of the report."""
    idle_s = [each.idle_s for each in views if each.exit_code is None and each.idle_s < math.inf]
    lines = [headline or f"error: no rank has made progress for {min(idle_s, default=0.0):.0f} s."]
    if verdict.cause:
        lines.append(f"{verdict.cause}.")
    lines += [f"stuck: {who}." for who in _by_text(verdict.stuck)]
    lines += [f"{_WAITING}{who}." for who in _by_text(verdict.waiting)]
    return lines


def _by_text(found: Mapping[int, str]) -> list[str]:
    """Return a clause for the ranks of which the same is said."""
    ranks: dict[str, list[int]] = {}
    for rank, what in sorted(found.items()):
        ranks.setdefault(what, []).append(rank)
    return [f"{'each of ' if len(same) > 1 else ''}{join_ranks(same)} {what}" for what, same in ranks.items()]


def _are_over(answers: Mapping[int, Mapping[str, Any]]) -> bool:
    return all(answer["is_over"] for answer in answers.values())
