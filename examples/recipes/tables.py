"""Write the tables of the comparisons into `docs/recipes.md`, and those of the records into `docs/records.md`.

python examples/recipes/tables.py
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from arms import Arm, Comparison, Task
from records import TUNING_SEED, Records, Run

from composer.cli.race import Entry, evaluate

DOCS = Path(__file__).parents[2] / "docs"
PAGE, LEDGER = DOCS / "recipes.md", DOCS / "records.md"
ENTRIES = Path(__file__).parent / "entries"
LOGS = Path(__file__).parent / "results" / "race"

NO_RESULT = "No result yet: not every arm of this comparison has been run."


def render(comparison: Comparison, records: Records) -> str:
    """Return what the page has to say about a comparison: its table, or that it is not complete."""
    if any(not final_runs(arm, records) for arm in comparison.arms):
        return NO_RESULT
    return render_table(comparison, records)


def render_table(comparison: Comparison, records: Records) -> str:
    """Put the runs of a comparison into a Markdown table: every arm, also those that lost.

    The target is the median final quality of the tuned baseline. The time to it is that of a run's first evaluation
    that finds the target reached, so it is known no better than to the time between two evaluations.

    Args:
        comparison: The arms.
        records: Their runs.

    Returns:
        The table, and below it a sentence about the composed recipe and each shorter form of it.

    Raises:
        ValueError: If the arms were not tuned alike, so that the comparison is not a fair one.
    """
    check_tuning(comparison, records)
    runs = {arm.name: final_runs(arm, records) for arm in comparison.arms}
    if not runs[comparison.baseline]:
        raise ValueError(
            f"{records.path} has no run of {comparison.baseline!r}, which sets the target: run the comparison with "
            f"--seeds 1 or more."
        )
    target = median(run.quality for run in runs[comparison.baseline])
    lines = [
        f"| arm | trained for | learning rate | seeds | CPU-s | {comparison.task.quality} | CPU-s to the target |",
        "|---|---|---|---|---|---|---|",
        *(_row(comparison, arm, records.best_lr(arm), runs[arm.name], target) for arm in comparison.arms),
        "",
        f"Medians, and in brackets the lowest and the highest of the seeds. Target: {comparison.task.format(target)}, "
        f"the median of the baseline at its end. Tuned, every arm alike, with the learning rates "
        f"{', '.join(f'{lr:g}' for lr in comparison.learning_rates)} on one seed more. {records.runs[0].machine}.",
        "",
        *(f"- {sentence}" for sentence in _verdicts(comparison, runs, target)),
    ]
    return "\n".join(lines)


def check_tuning(comparison: Comparison, records: Records) -> None:
    """Check that every arm had the same tuning.

    Raises:
        ValueError: If an arm was trained with fewer learning rates than another, or with others.
    """
    wanted = set(comparison.learning_rates)
    for arm in comparison.tuned:
        tried = {run.lr for run in records.runs if run.arm == arm.name and run.seed == TUNING_SEED}
        if tried != wanted:
            raise ValueError(
                f"{arm.name!r} was tuned with the learning rates {sorted(tried)} and not with {sorted(wanted)}, so "
                f"that a comparison with it would not be fair: run it first, with --arms {arm.name!r}."
            )


def write_table(page: Path, name: str, table: str) -> None:
    """Put a table between the comments on a page that are there for it.

    Args:
        page: Markdown, with the comments `<!-- NAME -->` and `<!-- end of NAME -->`.
        name: Of the comparison.
        table: What stands between them afterwards.

    Raises:
        ValueError: If the comments are not there.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = page.read_text()
    new, number = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{table}\n{end}", text, flags=re.DOTALL
    )
    if number != 1:
        raise ValueError(f"{page} has {number} places for the table {name!r}: it needs one {begin!r} ... {end!r}.")
    page.write_text(new)


def main() -> int:
    """Write the tables."""
    for page, name, table in render_all():
        write_table(page, name, table)
    return 0


def render_all() -> Iterator[tuple[Path, str, str]]:
    """Yield all tables of the documentation: their page, their name, and what they contain."""
    from ablations import ablation, render_ablation  # these import this module
    from comparison import RESULTS
    from glyphs import GLYPHS
    from stdlib import STDLIB

    for comparison in (GLYPHS, STDLIB):
        records = Records(RESULTS / f"{comparison.name}.jsonl", comparison)
        yield PAGE, comparison.name, render(comparison, records)
        logs = sorted(LOGS.glob(f"{comparison.name}_*.json"), key=lambda path: int(path.stem.rpartition("_")[2]))
        yield LEDGER, comparison.name, render_ledger(comparison.task, logs)
        entry = Entry.load(ENTRIES / f"{logs[-1].stem}.py")
        parts = ablation(entry)
        yield LEDGER, parts.name, render_ablation(parts, Records(RESULTS / f"{parts.name}.jsonl", parts))


def render_ledger(task: Task, logs: Sequence[Path]) -> str:
    """Return the table of the records of a task, the first of which is the reference of the first log."""
    lines = [
        f"| record | trained for | learning rate | CPU-s | {task.quality} | at the target | p | of the one before |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for index, path in enumerate(logs):
        log = json.loads(path.read_text())
        result = evaluate(log)
        if not index:
            qualities = [curve[-1][1] for curve in log["reference"]["curves"]]
            cells = _ledger_cells(task, log["reference"], result.reference_seconds, qualities)
            lines.append(f"| {' | '.join([*cells, '', '', ''])} |")
        cells = _ledger_cells(task, log["recipe"], result.seconds, result.qualities)
        cells += [f"{result.num_reached} of {len(result.qualities)}", f"{result.p:.1g}"]
        lines.append(f"| {' | '.join(cells)} | {result.ratio:.3f} (below {result.ratio_bound:.3f}) |")
    return "\n".join(lines)


def _ledger_cells(task: Task, part: Mapping[str, Any], seconds: list[float], qualities: list[float]) -> list[str]:
    name = f"{Path(part['file']).stem}: {part['name']}"
    times, ends = spread(seconds, "{:.2f}".format), spread(qualities, task.format)
    return [name, part["duration"], f"{part['lr']:g}", times, ends]


def final_runs(arm: Arm, records: Records) -> list[Run]:
    """Return the runs of an arm with its best learning rate, by their seeds."""
    lr = records.best_lr(arm)
    return [] if lr is None else records.of(arm, lr)


def _row(comparison: Comparison, arm: Arm, lr: float | None, runs: list[Run], target: float) -> str:
    cells = [arm.name, arm.duration, f"{lr:g}", str(len(runs))]
    if not runs:
        return f"| {' | '.join([*cells, '-', '-', '-'])} |"
    times = [time for run in runs if (time := seconds_to(comparison, run, target)) is not None]
    reached = f" in {len(times)} of {len(runs)}" if 0 < len(times) < len(runs) else ""
    cells += [
        spread([run.seconds for run in runs], "{:.1f}".format),
        spread([run.quality for run in runs], comparison.task.format),
        spread(times, "{:.1f}".format) + reached if times else "not reached",
    ]
    return f"| {' | '.join(cells)} |"


def seconds_to(comparison: Comparison, run: Run, target: float) -> float | None:
    """Return the CPU-seconds at which a run was first seen to have reached a target; `None` if it never was."""
    return next((seconds for seconds, quality in run.curve if comparison.task.is_reached(quality, target)), None)


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Write a median and, in brackets, the lowest and the highest value.

    Args:
        values: One or more.
        form: Writes one of them.
    """
    lowest, middle, highest = (form(value) for value in (min(values), median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({lowest} to {highest})"


def _verdicts(comparison: Comparison, runs: dict[str, list[Run]], target: float) -> list[str]:
    """Say what became of the composed recipe and of its other lengths, next to the baseline at its full length."""
    baseline = runs[comparison.baseline]
    names = [arm.name for arm in comparison.arms if comparison.composed in (arm.name, arm.like)]
    sentences = []
    for name in names:
        if not (own := runs[name]):
            continue
        ratio = median(run.seconds for run in own) / median(run.seconds for run in baseline)
        reached = sum(comparison.task.is_reached(run.quality, target) for run in own)
        sentences.append(
            f"*{name}* took {ratio:.2f} times the baseline's CPU-seconds, and ended at the target or better with "
            f"{reached} of {len(own)} seeds. {_overlap(comparison, own, baseline)}"
        )
    return sentences


def _overlap(comparison: Comparison, own: list[Run], baseline: list[Run]) -> str:
    ours, theirs = ([run.quality for run in runs] for runs in (own, baseline))
    if min(len(own), len(baseline)) < 5:
        return "Fewer than five seeds: this is a first look and no result."
    if max(min(ours), min(theirs)) <= min(max(ours), max(theirs)):
        return "Its final quality and the baseline's overlap, so that they differ by no more than the seeds do."
    if comparison.task.is_reached(median(ours), median(theirs)):
        return "Its worst seed is better than the baseline's best."
    return "Its best seed is worse than the baseline's worst."


if __name__ == "__main__":
    sys.exit(main())
