"""What each part of a record is worth: every part taken out once, and every pair of parts.

    python examples/recipes/ablations.py examples/recipes/entries/stdlib_1.py --seeds 5

The record, and the arm without its optimizer, are tuned with the same learning rates; the others take the learning
rate of that one of the two which has their optimizer. All train for as many batches as the record.
"""

import sys
from dataclasses import replace
from functools import reduce
from itertools import combinations
from pathlib import Path
from statistics import mean, median, stdev

from arms import Comparison
from comparison import main
from records import Records, Run
from tables import NO_RESULT, final_runs, spread

from composer.cli.race import Entry

WHOLE = "the record"


def ablation(entry: Entry) -> Comparison:
    """Return the arms without each part of a recipe and without each pair of them."""
    whole = replace(entry.arm, name=WHOLE, lr=None, settings={**entry.arm.settings, "eval_interval": "1dur"})
    arms = [whole]
    for number in (1, 2):
        for parts in combinations(entry.parts, number):
            arm = reduce(lambda arm, part: entry.parts[part](arm), parts, whole)
            tuned = next((tuned for tuned in arms if tuned.like is None and tuned.optimizer is arm.optimizer), None)
            arms.append(replace(arm, name=_without(*parts), like=tuned and tuned.name))
    return Comparison(
        name=f"{entry.path.stem}-ablation",
        task=entry.task,
        arms=tuple(arms),
        baseline=WHOLE,
        composed=WHOLE,
        learning_rates=entry.learning_rates,
    )


def render_ablation(comparison: Comparison, records: Records) -> str:
    """Return two tables: what is lost without each part, and how much more each pair of parts gains than their sum."""
    runs = {arm.name: final_runs(arm, records) for arm in comparison.arms}
    single = [arm for arm in comparison.arms if " and " not in arm.name]
    if not all(runs[arm.name] for arm in single):
        return NO_RESULT
    task, whole = comparison.task, median(run.quality for run in runs[WHOLE])
    lines = [f"| arm | learning rate | seeds | CPU-s | {task.quality} | lost |", "|---|---|---|---|---|---|"]
    for arm in single:
        own = runs[arm.name]
        seconds, qualities = [run.seconds for run in own], [run.quality for run in own]
        lost = "" if arm.name == WHOLE else _signed(comparison, _sign(comparison) * (whole - median(qualities)))
        cells = [arm.name, f"{own[0].lr:g}", str(len(own)), spread(seconds, "{:.2f}".format)]
        lines.append(f"| {' | '.join([*cells, spread(qualities, task.format), lost])} |")
    parts = [arm.name.removeprefix("without ") for arm in single if arm.name != WHOLE]
    lines += ["", f"| pair | {' | '.join(parts[1:])} |", "|---" * len(parts) + "|"]
    for row, first in enumerate(parts[:-1]):
        cells = [_interaction(comparison, runs, first, second) for second in parts[row + 1 :]]
        lines.append(f"| {' | '.join([first, *[''] * row, *cells])} |")
    return "\n".join(lines)


def _interaction(comparison: Comparison, runs: dict[str, list[Run]], first: str, second: str) -> str:
    """Return how much more the first part gains with the second one than without it."""
    names = (WHOLE, _without(first), _without(second), _without(first, second))
    by_seed = [{run.seed: run.quality for run in runs[name]} for name in names]
    values = [
        _sign(comparison) * (by_seed[0][seed] - by_seed[1][seed] - by_seed[2][seed] + by_seed[3][seed])
        for seed in by_seed[3]
        if all(seed in qualities for qualities in by_seed)
    ]
    if not values:
        return "-"
    error = "" if len(values) < 2 else f" ± {_signed(comparison, stdev(values) / len(values) ** 0.5)[1:]}"
    return _signed(comparison, mean(values)) + error


def _sign(comparison: Comparison) -> int:
    return 1 if comparison.task.is_better_higher else -1


def _signed(comparison: Comparison, difference: float) -> str:
    return f"{100 * difference:+.1f}" if comparison.task.percent else f"{difference:+.3f}"


def _without(*parts: str) -> str:
    return f"without {' and '.join(parts)}"


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).exists():
        sys.exit("Pass the file of a record first, such as examples/recipes/entries/stdlib_1.py.")
    sys.exit(main(ablation(Entry.load(Path(sys.argv.pop(1)))), __doc__, render_ablation))
