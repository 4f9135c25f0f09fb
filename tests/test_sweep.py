"""A sweep goes on after a run that fails, stops at a signal, and trains only what is missing when it is repeated."""

import json
import re
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

RECIPE = """\
model:
  _target_: composer.models.ComposerClassifier
  module: {_target_: torch.nn.Linear, in_features: 4, out_features: 3}
  num_classes: 3
train_dataloader:
  name: dataloader
  batch_size: 8
  dataset: {_target_: parts_of_sweep.Rows}
optimizers: {name: sgd, lr: 1e-2}
callbacks:
  - {_target_: parts_of_sweep.Trouble, how: none}
max_duration: 3ba
seed: 17
device: cpu
progress_bar: false
"""

PARTS = """\
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from composer import Callback


class Rows(TensorDataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        super().__init__(torch.randn(24, 4, generator=generator), torch.arange(24) % 3)


class Trouble(Callback):
    def __init__(self, how: str, trial: str = ""):
        self.how, self.trial = how, trial
        if how == "raise" and not Path("mended").exists():
            raise ValueError("no such thing")

    def batch_end(self, state, logger):
        if state.timestamp.batch < 2 or Path("mended").exists() or (self.trial and state.run_name != self.trial):
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "interrupt":
            if state.timestamp.batch == 2:
                os.kill(os.getppid(), signal.SIGINT)
                state.max_duration = "10000ba"  # until the signal arrives
            time.sleep(0.01)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "parts_of_sweep.py").write_text(PARTS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(*arguments):
    """Return the exit status, the runs that began or the commands, and what was written to stderr."""
    command = [sys.executable, "-m", "composer_dist.launch", "sweep", "-n", "1", "recipe.yaml"]
    command += ["--allow", "parts_of_sweep", *arguments]
    done = subprocess.run(command, check=False, timeout=600, capture_output=True, text=True)
    return done.returncode, re.findall("^(?:sweep:|composer) (.*)$", done.stdout, re.MULTILINE), done.stderr


def statuses(folder):
    """Return how each run on the page ended, and whether with an error, by name."""
    page = (folder / "report.html").read_text()
    (shown,) = re.findall(r"<script[^>]*application/json[^>]*>(.*?)</script>", page, re.DOTALL)
    return {run["name"]: (run["status"]["status"], bool(run["status"]["error"])) for run in json.loads(shown)["runs"]}


@pytest.mark.slow
def test_runs_that_fail_are_named_and_repeated_and_a_signal_ends_the_sweep(folder):
    how = "callbacks.0.how=none,raise,kill,interrupt,after"
    names = [f"callbacks.0.how={each}" for each in how.partition("=")[2].split(",")]
    status, begun, stderr = sweep(how)
    assert (status, begun) == (130, names[:4])
    assert f"failed: {names[1]}, {names[2]}." in stderr
    ended = dict.fromkeys(names[1:4], ("failed", True)) | {names[0]: ("finished", False)}
    assert statuses(folder / "runs/recipe-sweep") == ended

    (folder / "mended").touch()
    assert sweep(how)[:2] == (0, names[1:])
    assert statuses(folder / "runs/recipe-sweep") == dict.fromkeys(names, ("finished", False))
    status, commands, stderr = sweep("--dry-run", how)
    assert (status, commands) == (0, [])
    assert "finished already: 5 of 5" in stderr
    assert len(sweep("--dry-run", how, "max_duration=2ba")[1]) == 5  # another recipe under the same names


@pytest.mark.slow
def test_a_study_goes_on_where_it_was_interrupted(folder):
    search = ["lr=1e-4..1e-1", "callbacks.0.how=interrupt", "callbacks.0.trial=trial-1"]
    search += ["--minimize", "loss/train/total"]
    status, begun, _ = sweep("--optuna", "3", *search)
    assert status == 130
    assert [each.split()[0] for each in begun] == ["trial-0", "trial-1"]

    (folder / "mended").touch()
    status, again, _ = sweep("--optuna", "3", *search)
    assert (status, again[0], len(again)) == (0, begun[1], 2)
    assert len(sweep("--optuna", "4", *search)[1]) == 1

    storage = optuna.storages.JournalStorage(JournalFileBackend("runs/recipe-sweep/optuna.log"))
    (name,) = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=name, storage=storage).get_trials(states=[optuna.trial.TrialState.COMPLETE])
    assert len({trial.params["lr"] for trial in trials}) == len(trials) == 4
    for trial in trials:
        assert 1e-4 <= trial.params["lr"] <= 1e-1
    best = min(trials, key=lambda trial: trial.value)
    lines = [json.loads(line)["metrics"] for line in metrics_of(best).read_text().splitlines()]
    assert best.value == [line["loss/train/total"] for line in lines if "loss/train/total" in line][-1]


def metrics_of(trial):
    name = trial.user_attrs.get("run_name", f"trial-{trial.number}")
    return sorted(Path("runs/recipe-sweep").glob(f"{name}*/metrics.jsonl"))[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lr=0.1..0.5"], "'lr=0.1..0.5' must be whole numbers"),
        (["lr=0.1,fast"], "the command line: optimizers.lr: 'fast' does not fit"),
        (["lr=0.1,0.2", "--optuna", "3"], "--optuna N needs --minimize METRIC"),
        (["lr=0.1", "--optuna", "3", "--minimize", "loss"], "--optuna needs values to choose from"),
        (["max_duration=1ba,1week", "--optuna", "3", "--minimize", "loss"], "the command line: max_duration: .*1week"),
    ],
)
def test_a_sweep_that_is_not_valid_trains_nothing(folder, arguments, message):
    status, begun, stderr = sweep(*arguments)
    assert (status, begun) == (2, [])
    assert re.search(message, stderr)
    assert not list(folder.glob("runs/**/metrics.jsonl"))


@pytest.mark.slow
def test_a_metric_that_the_runs_do_not_have_ends_a_study_at_its_first_trial(folder):
    status, begun, stderr = sweep("--optuna", "3", "--minimize", "loss/train/totl", "lr=1e-4..1e-1")
    assert (status, len(begun)) == (2, 1)
    assert "has no metric 'loss/train/totl'. Did you mean 'loss/train/total'?" in stderr
