"""The runs of a sweep, each in a folder of its own, which tells whether it has finished."""

import datetime
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.cli._values import is_named
from composer.report.runs import CONFIG, METRICS, STATUS, read_json, write_page
from composer_checkpoint.lock import FolderInUseError, FolderLock
from composer_dist.launch.args import parse_options
from composer_dist.launch.main import main as launch
from composer_dist.launch.topology import child_command, resolve, resolve_nproc

if TYPE_CHECKING:
    from composer.recipe import Plan

_DONE = ("finished", "stopped early")


class Sweep:
    """The runs of one recipe, in one folder.

    Args:
        command: The arguments of the launcher, the recipe, and its arguments.

    Attributes:
        arguments: The arguments of the recipe.
        folder: The folder of the runs.

    Raises:
        ValueError: If the command runs no recipe, or without folders of runs.
    """

    def __init__(self, command: Sequence[str]) -> None:
        options = parse_options(command)
        recipe = options.training_script
        if not recipe.endswith((".yaml", ".yml")):
            raise ValueError(f"{recipe!r} must be a recipe, a file with the ending .yaml.")
        if options.no_runs:
            raise ValueError("--no-runs cannot be combined with a sweep, which compares the folders of its runs.")
        num_before = len(command) - len(options.training_script_args)
        self.folder = Path(options.runs or Path("runs", f"{Path(recipe).stem}-sweep"))
        self.arguments = list(command[num_before:])
        self._start = [*([] if options.runs else ["--runs", str(self.folder)]), *command[:num_before]]
        self._claimed = set[str]()
        self._options = options
        self._interruptions = [128 + signal.Signals[name.strip()] for name in options.signals_to_handle.split(",")]

    def check_nodes(self) -> None:
        """Check that all ranks are on this node.

        Each node would decide by its own folder which runs have finished, so that ranks could train different runs
        together.

        Raises:
            ValueError: If some ranks are on other nodes.
        """
        options = self._options
        if options.nnodes is None:
            is_multi_node = resolve(options, os.environ, resolve_nproc(options, os.environ, _count)).is_multi_node
        else:
            is_multi_node = options.nnodes.rpartition(":")[2] != "1"
        if is_multi_node:
            raise ValueError(
                "a sweep trains on one node. For several nodes, print the commands with --dry-run, and run each "
                "of them on all nodes."
            )

    def check_folders(self, plans: Iterable["Plan"]) -> None:
        """Check that no run would resume from the checkpoints of another one.

        Raises:
            ValueError: If runs with `autoresume` have the same `save_folder`.
        """
        seen = set[str]()
        for values in (plan.values for plan in plans):
            folder = str(values.get("save_folder") or "{run_name}")
            if not values.get("autoresume") or "{run_name}" in f"{folder}{values.get('save_latest_filename')}":
                continue
            if folder in seen:
                raise ValueError(
                    f"save_folder={folder!r} must contain {{run_name}}, since with autoresume each run would continue "
                    f"from the checkpoints of the one before. Pass 'save_folder={folder}/{{run_name}}'."
                )
            seen.add(folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder of the runs, which is created if it does not exist.

        Raises:
            ValueError: If another sweep trains in it.
            OSError: If it cannot be made or written to.
        """
        try:
            lock = FolderLock(self.folder).acquire()
        except FolderInUseError:
            raise ValueError(
                f"another sweep trains in {str(self.folder)!r}. Wait until it has ended, or pass another --runs for "
                "a sweep of other values."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def command(self, changes: Sequence[str]) -> list[str]:
        """Return the arguments of the launcher for a run."""
        return [*self._start, *changes]

    def plan(self, changes: Sequence[str]) -> "Plan":
        """Return the checked recipe of a run.

        Raises:
            RecipeError: If it is not valid.
        """
        from composer.recipe.__main__ import parse  # loads torch

        return parse(child_command(parse_options(self.command(changes)), os.environ)[1:])[0]

    def claim(self, name: str, changes: Sequence[str]) -> tuple[str, list[str], "Plan"]:
        """Return the name of a run, its arguments, and its checked recipe.

        The name gets a number if another run of this sweep has it, or if the folder has runs of that name with another
        recipe, whose checkpoints a run with `autoresume` would continue from.

        Raises:
            RecipeError: If the recipe is not valid.
        """
        if is_named(changes):
            return name, list(changes), self.plan(changes)
        for number in count(1):
            own = name if number == 1 else f"{name}-{number}"
            arguments = [*changes, f"run_name={own}"]
            if own in self._claimed:
                continue
            plan = self.plan(arguments)
            recipes = [folder / "recipe.yaml" for folder, _ in _kept((self.folder / own).parent, own)]
            if all(each.read_text(encoding="utf-8") == plan.text for each in recipes if each.is_file()):
                self._claimed.add(own)
                return own, arguments, plan
        raise AssertionError

    def finished(self, plan: "Plan") -> Path | None:
        """Return the folder of a run that has finished with the same recipe, or `None`."""
        name = str(plan.values["run_name"])
        for folder, _ in _kept((self.folder / name).parent, name):
            recipe = folder / "recipe.yaml"
            if _is_done(folder) and recipe.is_file() and recipe.read_text(encoding="utf-8") == plan.text:
                return folder
        return None

    def train(self, name: str, changes: Sequence[str], plan: "Plan") -> int:
        """Train one run, and return its exit status. If it fails, its folder says so."""
        sys.stdout.write(f"sweep: {name}\n")
        sys.stdout.flush()
        started = datetime.datetime.now(datetime.UTC).isoformat()
        # In this process, so that signals reach the launcher and not only its parent.
        if status := launch(self.command(changes)):
            self._note(plan, status, started)
        return status

    def is_interruption(self, status: int) -> bool:
        """Return whether an exit status is that of a signal which the launcher handles."""
        return status in self._interruptions

    def end(self, failed: Sequence[str], status: int = 0) -> int:
        """Write the page, and return the exit status."""
        if shown := self._shown():
            sys.stdout.write(f"{write_page(shown, self.folder / 'report.html')}\n")
        if failed:
            sys.stderr.write(f"composer sweep: failed: {', '.join(failed)}. The same command trains what is missing.\n")
        return status or (1 if failed else 0)

    def _shown(self) -> list[Path]:
        """Return the folders of all runs, without failed ones of which there is a later one."""
        runs: dict[str, list[Path]] = {}
        for folder, name in _kept(self.folder):
            runs.setdefault(name, []).append(folder)
        return [each for folders in runs.values() for each in folders if _is_done(each) or each == folders[-1]]

    def _note(self, plan: "Plan", status: int, started: str) -> None:
        """Write the failure of a run into its folder, which a run that was killed, or never began, does not."""
        name = str(plan.values["run_name"])
        folders = [folder for folder, _ in _kept((self.folder / name).parent, name)]
        folder = next((each for each in folders if read_json(each / STATUS).get("updated", "") >= started), None)
        if folder is None:
            folder = self.folder / name
            numbers = count(2)
            while folder.exists():
                folder = self.folder / f"{name}-{next(numbers)}"
            folder.mkdir(parents=True)
            (folder / METRICS).touch()
            (folder / CONFIG).write_text(json.dumps({"run_name": name}))
            (folder / "recipe.yaml").write_text(plan.text, encoding="utf-8")
        facts = {"status": "running", "started": started, "updated": started, **read_json(folder / STATUS)}
        if facts["status"] == "running":
            facts["status"] = "failed"
        facts["error"] = facts.get("error") or f"The run ended with exit status {status}. Its output has the cause."
        (folder / STATUS).write_text(json.dumps(facts, indent=1))


def _count() -> int:
    import torch  # slow, so only if the number of processes is not given

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _kept(folder: Path, name: str | None = None) -> Iterator[tuple[Path, str]]:
    """Yield the folders of runs, the oldest first, with the names of the runs: those below, or here those of a name."""
    found = [path.parent for path in folder.glob("**/config.json" if name is None else "*/config.json")]
    for each in sorted(found, key=lambda each: str(read_json(each / STATUS).get("started"))):
        own = str(read_json(each / CONFIG).get("run_name"))
        if (each / METRICS).exists() and name in (None, own):
            yield each, own


def _is_done(folder: Path) -> bool:
    status: Mapping[str, Any] = read_json(folder / STATUS)
    return status.get("status") in _DONE and not status.get("error")
