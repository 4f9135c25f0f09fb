"""A sweep goes on after a run that fails, stops at a signal, and trains only what is missing when it is repeated."""

import json
import re
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from composer.cli import sweep as command
from composer.cli._runs import Sweep
from composer.cli._values import named_runs, split_values

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
    ("text", "values"),
    [
        ("", [""]),
        ("'',1", ["''", "1"]),
        ("don't,won't", ["don't", "won't"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("'it''s, so',c", ["'it''s, so'", "c"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        ("[1,'a,]'], [2]", ["[1,'a,]']", "[2]"]),
        ("{a: 'b,}'},null,true", ["{a: 'b,}'}", "null", "true"]),
        ("a],b", ["a]", "b"]),
        ("1..3,9", ["1", "2", "3", "9"]),
        ("3..1,-1..0", ["3", "2", "1", "-1", "0"]),
        ("'1..3'", ["'1..3'"]),
        ("../data", ["../data"]),
        ("a..b,..", ["a..b", ".."]),
    ],
)
def test_values_are_split_where_yaml_would_begin_another(text, values):
    assert split_values(f"x={text}") == ("x", values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,", "on each side of a comma"),
        (",1", "on each side of a comma"),
        ("1,,2", "on each side of a comma"),
        ("'a,b", "quotation mark ' that must be closed"),
        ("['a,b]", "quotation mark ' that must be closed"),
        ("1..2..3", "'1..2..3' .* must be a range of whole numbers"),
        ("1..", "'1..' .* must be a range of whole numbers"),
        ("..5", "'..5' .* must be a range of whole numbers"),
        ("1..x", "'1..x' .* must be a range of whole numbers"),
        ("0.1..0.5,1", "'0.1..0.5' .* must be a range of whole numbers"),
    ],
)
def test_values_that_are_not_whole_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        split_values(f"x={text}")


def test_long_names_of_runs_are_files_and_stay_distinct_and_the_same():
    alike = "é" * 300
    names = list(named_runs([f"note={alike}1,{alike}2", "seed=1"]))
    assert len(set(names)) == 2
    assert all(len(name.encode()) <= 200 for name in names)
    assert next(iter(named_runs([f"note={alike}2,{alike}3", "seed=1"]))) == names[1]


def record(folder, plan):
    """Leave the folder of a run that was interrupted."""
    own = folder / plan.values["run_name"]
    own.mkdir(parents=True)
    (own / "config.json").write_text(json.dumps({"run_name": own.name}))
    (own / "metrics.jsonl").touch()
    (own / "recipe.yaml").write_text(plan.text)


def test_a_run_whose_recipe_has_changed_gets_another_name(folder):
    def claim(*changes):
        return Sweep(["-n", "1", "--runs", "runs", "recipe.yaml", "--allow", "parts_of_sweep"]).claim(
            "seed=1", ["--allow", "parts_of_sweep", "seed=1", *changes]
        )

    name, changes, plan = claim()
    assert (name, changes[-1], plan.values["run_name"]) == ("seed=1", "run_name=seed=1", "seed=1")
    record(folder / "runs", plan)
    assert claim()[0] == "seed=1"
    name, changes, plan = claim("max_duration=2ba")
    assert (name, changes[-1], plan.values["run_name"]) == ("seed=1-2", "run_name=seed=1-2", "seed=1-2")
    record(folder / "runs", plan)
    assert claim("max_duration=2ba")[0] == "seed=1-2"
    assert claim()[0] == "seed=1"


def test_the_recipe_of_a_run_finds_what_is_in_the_current_folder(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "runs/plum").mkdir(parents=True)
    (folder / "parts_of_plum.py").write_text(PARTS)
    (folder / "runs/plum/recipe.yaml").write_text(RECIPE.replace("parts_of_sweep", "parts_of_plum"))
    allow = ["--allow", "parts_of_plum"]
    assert Sweep(["-n", "1", "runs/plum/recipe.yaml", *allow]).plan(allow).values["max_duration"] == "3ba"


def test_the_new_name_of_a_run_is_not_that_of_the_next_one(folder):
    sweep = Sweep(["-n", "1", "--runs", "runs", "recipe.yaml", "--allow", "parts_of_sweep"])
    record(folder / "runs", sweep.claim("note", ["--allow", "parts_of_sweep", "seed=1"])[2])
    again = Sweep(["-n", "1", "--runs", "runs", "recipe.yaml", "--allow", "parts_of_sweep"])
    runs = {"note": "seed=2", "note-2": "seed=3"}
    names = [again.claim(name, ["--allow", "parts_of_sweep", change])[0] for name, change in runs.items()]
    assert names == ["note-2", "note-2-2"]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ([], ["seed=1,2", "run_name=plum"]),
        ([], ["seed=1,2", "run_name=plum,pear"]),
        (["--optuna", "3", "--minimize", "loss"], ["seed=1..9", "run_name=plum"]),
    ],
)
def test_one_name_for_several_runs_is_refused(folder, capsys, options, values):
    assert command.main([*options, "-n", "1", "recipe.yaml", "--allow", "parts_of_sweep", *values]) == 2
    assert re.search(
        "run_name= cannot be combined with .* need different names. Leave it out.", capsys.readouterr().err
    )
    assert not list(folder.glob("runs/**/metrics.jsonl"))


@pytest.mark.parametrize("options", [[], ["--optuna", "3", "--minimize", "loss"]])
def test_runs_that_would_resume_from_those_of_another_are_refused(folder, capsys, options):
    values = ["seed=1..2", "autoresume=true", "save_folder=saved"]
    assert command.main([*options, "-n", "1", "recipe.yaml", "--allow", "parts_of_sweep", *values]) == 2
    assert "Pass 'save_folder=saved/{run_name}'." in capsys.readouterr().err
    assert not list(folder.glob("runs/**/metrics.jsonl"))


@pytest.mark.parametrize("where", ["saved/{run_name}", "saved/${seed}"])
def test_runs_that_resume_in_folders_of_their_own_are_not_refused(folder, capsys, where):
    values = ["seed=1..2", "autoresume=true", f"save_folder={where}"]
    assert command.main(["--dry-run", "-n", "1", "recipe.yaml", "--allow", "parts_of_sweep", *values]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_names_that_differ_by_a_reference_may_be_given(folder, capsys):
    arguments = ["--dry-run", "-n", "1", "recipe.yaml", "--allow", "parts_of_sweep", "seed=1,2", "run_name=s-${seed}"]
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.count("run_name=s-${seed}") == 2


@pytest.mark.parametrize("options", [[], ["--optuna", "3", "--minimize", "loss"]])
def test_a_folder_that_cannot_have_the_runs_is_refused_before_any_run(folder, capsys, options):
    arguments = [*options, "-n", "1", "--runs", "taken", "recipe.yaml", "--allow", "parts_of_sweep", "seed=1,2"]
    (folder / "taken").touch()
    assert command.main(arguments) == 2
    shown = capsys.readouterr()
    assert "taken is not a folder" in shown.err
    assert "sweep:" not in shown.out


@pytest.mark.parametrize("options", [[], ["--optuna", "3", "--minimize", "loss"]])
def test_two_sweeps_do_not_train_in_one_folder_at_once(folder, capsys, options):
    arguments = ["-n", "1", "--runs", "runs", "recipe.yaml", "--allow", "parts_of_sweep", "seed=1,2"]
    other = "from composer_checkpoint.lock import FolderLock; FolderLock('runs').acquire(); print(); input()"
    process = subprocess.Popen([sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()  # it has the lock
    try:
        assert command.main([*options, *arguments]) == 2
        shown = capsys.readouterr()
        assert "another sweep trains in 'runs'" in shown.err
        assert "sweep:" not in shown.out
        assert command.main(["--dry-run", *arguments]) == 0
    finally:
        process.communicate(b"\n", timeout=60)


@pytest.mark.parametrize(
    "nodes",
    [["-N", "2"], ["--world_size", "2", "--node_rank", "0", "--master_addr", "node-0", "--master_port", "1"]],
)
def test_a_sweep_over_several_nodes_is_refused_except_for_its_commands(folder, capsys, nodes):
    arguments = ["-n", "1", *nodes, "recipe.yaml", "--allow", "parts_of_sweep", "seed=1,2"]
    assert command.main(arguments) == 2
    assert "a sweep trains on one node" in capsys.readouterr().err
    assert command.main(["--dry-run", *arguments]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


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
