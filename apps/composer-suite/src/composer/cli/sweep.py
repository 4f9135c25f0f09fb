"""The command `composer sweep`: train a recipe once for each combination of values, and compare the runs."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from composer.cli._runs import Sweep
from composer.cli._values import named_runs

_USAGE = (
    "composer sweep [--dry-run] [--optuna N --minimize METRIC] [LAUNCHER OPTIONS] recipe.yaml KEY=A,B [KEY=1..5 ...]"
)
_DESCRIPTION = """\
Train a recipe once for each combination of values, one run after the other, and write a page that compares the runs.

  KEY=A,B         these values; commas within brackets or quotation marks do not separate
  KEY=1..5        whole numbers from 1 to 5; also in a list, as in 1..5,9
  KEY=0.1..0.5    with --optuna, a number between these
  KEY=1e-4..1e-2  with --optuna, the same on a logarithmic scale

Other options go to the launcher (before the recipe, such as -n 2) or to the recipe (after it). The same command again
trains only what has not finished.

Exit status: 0 if every run has finished; 1 if one has failed, after the others; 2 for an invalid command line, before
any run; 128 + s if signal s has ended the sweep.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="composer sweep",
        usage=_USAGE,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # other options are those of the launcher
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, one per line, for a job array")
    parser.add_argument("--optuna", type=int, metavar="N", help="choose the values of N runs with Optuna")
    goal = parser.add_mutually_exclusive_group()
    for direction in ("minimize", "maximize"):
        goal.add_argument(f"--{direction}", metavar="METRIC", help="with --optuna, such as metrics/eval/CrossEntropy")
    asked, command = parser.parse_known_args(arguments)
    direction, metric = ("minimize", asked.minimize) if asked.minimize else ("maximize", asked.maximize)
    if (asked.optuna is None) != (metric is None):
        parser.error("--optuna N needs --minimize METRIC or --maximize METRIC, and the other way around.")
    if asked.optuna is not None and (asked.optuna < 1 or asked.dry_run):
        parser.error("--optuna must be 1 or more, without --dry-run.")
    try:
        sweep = Sweep(command)
        if not asked.dry_run:
            sweep.check_nodes()
        if asked.optuna is None:
            return _train_all(sweep, dry_run=asked.dry_run)
        from composer.cli._study import search  # loads torch

        return search(sweep, asked.optuna, direction, metric)
    except (ImportError, OSError, ValueError) as error:
        sys.stderr.write(f"composer sweep: error: {error}\n")
        return 2


def _train_all(sweep: Sweep, *, dry_run: bool) -> int:
    # Errors before anything trains.
    runs = [sweep.claim(name, changes) for name, changes in named_runs(sweep.arguments).items()]
    if len({str(plan.values["run_name"]) for _, _, plan in runs}) < len(runs):
        raise ValueError("run_name= cannot be combined with several runs, which need different names. Leave it out.")
    sweep.check_folders(plan for _, _, plan in runs)
    missing = [run for run in runs if sweep.finished(run[2]) is None]
    if len(missing) < len(runs):
        sys.stderr.write(f"composer sweep: finished already: {len(runs) - len(missing)} of {len(runs)} runs.\n")
    if dry_run:
        sys.stdout.write("".join(f"composer {shlex.join(sweep.command(changes))}\n" for _, changes, _ in missing))
        return 0
    failed: list[str] = []
    with sweep.lock():
        for name, changes, plan in missing:
            if sweep.finished(plan):  # by another sweep, before this one got the lock
                continue
            status = sweep.train(name, changes, plan)
            if sweep.is_interruption(status):
                return sweep.end(failed, status)
            if status or sweep.finished(plan) is None:
                failed.append(name)
        return sweep.end(failed)
