"""A sweep whose values Optuna chooses."""

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from composer.cli._runs import Sweep
from composer.cli._values import Range, is_named, split_values
from composer.loggers._service_queue import require
from composer.recipe._read import nearest
from composer.report.runs import read_run

_FILE = "optuna.log"  # a journal in the folder of the sweep


def search(sweep: Sweep, num_trials: int, direction: str, metric: str) -> int:
    """Train until a study has a number of trials with a value, and return the exit status.

    The same command and recipe continue their study. A trial that was interrupted is repeated, and continues from its
    last checkpoint if the recipe has `autoresume: true`. A trial that fails has no value.

    Args:
        sweep: The runs.
        num_trials: The number of trials with a value.
        direction: `'minimize'` or `'maximize'`.
        metric: The metric, whose last value counts.

    Raises:
        MissingConditionalImportError: If Optuna is not installed; the extra `optuna` brings it.
        ValueError: If there is nothing to choose, runs do not have the metric, or another sweep trains in the folder.
    """
    optuna, journal = require("optuna", extra="optuna"), require("optuna.storages.journal", extra="optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if is_named(sweep.arguments):
        raise ValueError("run_name= cannot be combined with --optuna, whose runs need different names. Leave it out.")
    values: dict[str, list[str] | Range] = {}
    fixed: list[str] = []
    for argument in sweep.arguments:
        key, choices = split_values(argument)
        if isinstance(choices, Range) or (choices and len(choices) > 1):
            values[key] = choices
        else:
            fixed.append(argument)
    if not values:
        raise ValueError("--optuna needs values to choose from, such as lr=1e-4..1e-2 or batch_size=16,32.")
    space = {key: _distribution(optuna, choice) for key, choice in values.items()}
    plans = [sweep.plan([*fixed, *_spell(params)]) for params in _corners(values)]  # errors before anything trains
    sweep.check_folders(plans)
    digest = hashlib.sha256("\n".join(plan.text for plan in plans).encode()).hexdigest()
    with sweep.lock():
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(journal.JournalFileBackend(str(sweep.folder / _FILE))),
            study_name=f"{direction} {metric} {digest[:16]}",
            direction=direction,
            load_if_exists=True,
        )
        return _Search(sweep, optuna, study, metric).run(num_trials, space, fixed)


class _Search:
    def __init__(self, sweep: Sweep, optuna: Any, study: Any, metric: str) -> None:
        self._sweep, self._optuna, self._study, self._metric = sweep, optuna, study, metric
        self._states = optuna.trial.TrialState

    def run(self, num_trials: int, space: Mapping[str, Any], fixed: list[str]) -> int:
        """Train until the study has a number of trials with a value, and return the exit status."""
        study, failed = self._study, list[str]()
        for trial in study.get_trials(states=(self._states.RUNNING,)):  # of a sweep that was interrupted
            study.enqueue_trial(trial.params, user_attrs={"run_name": _name(trial)})
            study.tell(trial.number, state=self._states.FAIL)
        for _ in range(num_trials - len(study.get_trials(states=(self._states.COMPLETE,)))):
            # From the number, so that a study that was interrupted chooses the same values.
            study.sampler = self._optuna.samplers.TPESampler(seed=len(study.trials))
            trial = study.ask(space)
            name, changes, plan = self._sweep.claim(_name(trial), [*fixed, *_spell(trial.params)])
            folder = self._sweep.finished(plan)
            status = 0 if folder else self._sweep.train(f"{name} {' '.join(_spell(trial.params))}", changes, plan)
            if self._sweep.is_interruption(status):
                return self._sweep.end(failed, status)
            folder = folder or self._sweep.finished(plan)
            value = None if folder is None else self._value(trial, folder)
            if value is None or not math.isfinite(value):
                failed.append(name)
                study.tell(trial, state=self._states.FAIL)
            else:
                study.tell(trial, value)
        if study.get_trials(states=(self._states.COMPLETE,)):
            best = study.best_trial
            sys.stdout.write(f"best: {_name(best)} {' '.join(_spell(best.params))} {self._metric}={best.value:.6g}\n")
        return self._sweep.end(failed)

    def _value(self, trial: Any, folder: Any) -> float:
        curves = read_run(folder).curves
        if self._metric not in curves:
            self._study.tell(trial, state=self._states.FAIL)
            raise ValueError(f"the run in {folder} has no metric {self._metric!r}. {nearest(self._metric, curves)}")
        return curves[self._metric].values[-1]


def _name(trial: Any) -> str:
    return trial.user_attrs.get("run_name", f"trial-{trial.number}")


def _spell(params: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in params.items()]


def _distribution(optuna: Any, values: list[str] | Range) -> Any:
    """Return what a value is drawn from."""
    if isinstance(values, list):
        return optuna.distributions.CategoricalDistribution(values)
    low, high = sorted((values.first, values.last))
    if isinstance(low, int) and isinstance(high, int):
        return optuna.distributions.IntDistribution(low, high)
    return optuna.distributions.FloatDistribution(low, high, log=values.is_log)


def _corners(values: Mapping[str, list[str] | Range]) -> Iterator[dict[str, Any]]:
    """Yield combinations in which each choice and each end of a range occurs."""
    ends = {key: each if isinstance(each, list) else [each.first, each.last] for key, each in values.items()}
    for index in range(max(map(len, ends.values()))):
        yield {key: choices[min(index, len(choices) - 1)] for key, choices in ends.items()}
