"""Runs of scripts that name no recorder, under `COMPOSER_RUNS`."""

import json
import sys
import warnings

import pytest

from composer.core import Callback
from composer.loggers import FileLogger
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from composer.report import RunRecorder, read_run
from composer.report.cli import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Ask for a folder for each run."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("COMPOSER_RUNS", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def recorders(trainer):
    return [place for place in trainer.logger.destinations if isinstance(place, RunRecorder)]


def finish(trainer):
    trainer.fit()
    trainer.close()


def test_a_script_that_names_no_recorder_leaves_a_folder(make_trainer, runs):
    finish(make_trainer(max_duration="1ep", run_name="plum"))
    run = read_run(runs / "plum")
    assert len(run.curves["loss/train/total"].values) == 2
    assert (run.status["status"], run.status["batch"]) == ("finished", 2)
    assert not (runs / "plum" / "report.html").exists()  # which `composer report` makes


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_nothing_is_recorded_or_written(make_trainer, monkeypatch, tmp_path, value):
    monkeypatch.delenv("COMPOSER_RUNS", raising=False)
    if value is not None:
        monkeypatch.setenv("COMPOSER_RUNS", value)
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(max_duration="1ep")
    assert recorders(trainer) == []
    finish(trainer)
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_names_a_recorder_has_that_one_only(make_trainer, runs, tmp_path):
    own = RunRecorder(tmp_path / "own", page=False)
    trainer = make_trainer(max_duration="1ep", loggers=[FileLogger("log.txt"), own])
    assert recorders(trainer) == [own]
    finish(trainer)
    assert not runs.exists()


def test_a_second_run_of_one_name_gets_a_folder_beside_the_first(make_trainer, runs):
    for duration in ("1ep", "2ep", "3ep"):
        finish(make_trainer(max_duration=duration, run_name="plum-1"))
    batches = [read_run(runs / name).status["batch"] for name in ("plum-1", "plum-1-2", "plum-1-3")]
    assert batches == [2, 4, 6]


def test_a_run_that_is_resumed_goes_on_in_its_folder(make_trainer, runs):
    saving = {"save_folder": "checkpoints", "autoresume": True, "run_name": "plum"}
    finish(make_trainer(max_duration="1ep", **saving))
    finish(make_trainer(max_duration="2ep", **saving))
    assert [folder.name for folder in runs.iterdir()] == ["plum"]
    run = read_run(runs / "plum")
    assert run.curves["loss/train/total"].at["batch"] == [0, 1, 2, 3]
    assert len(run.checkpoints) == 2


def test_a_checkpoint_of_a_recorded_run_is_loaded_without_a_recorder(make_trainer, runs, monkeypatch):
    finish(make_trainer(max_duration="1ep", run_name="plum", save_folder="checkpoints"))
    monkeypatch.delenv("COMPOSER_RUNS")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finish(make_trainer(max_duration="2ep", load_path="checkpoints/ep1-ba2-rank0.pt"))


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/runs"])
def test_a_folder_that_cannot_be_written_costs_one_warning_and_no_step(make_trainer, runs, monkeypatch, where):
    runs.with_name("file").write_text("in the way")
    monkeypatch.setenv("COMPOSER_RUNS", where)
    with pytest.warns(RuntimeWarning, match="cannot be written, so this run leaves no record") as caught:
        trainer = make_trainer(max_duration="2ep", run_name="plum", save_folder="checkpoints")
    assert len(caught) == 1
    finish(trainer)  # where a second warning would be an error
    assert trainer.state.timestamp.batch == 4


def test_braces_in_the_name_are_meant_as_such(make_trainer, runs, monkeypatch):
    monkeypatch.setenv("COMPOSER_RUNS", "{rank}/{")
    finish(make_trainer(max_duration="1ep", run_name="plum"))
    assert read_run(runs.with_name("{rank}") / "{" / "plum").name == "plum"


def test_a_script_that_changes_its_folder_keeps_its_record_in_one_place(make_trainer, runs, monkeypatch, tmp_path):
    monkeypatch.setenv("COMPOSER_RUNS", "runs")
    trainer = make_trainer(max_duration="1ep", run_name="plum")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    finish(trainer)
    assert read_run(runs / "plum").status["status"] == "finished"


def test_traces_and_checkpoints_are_found_wherever_the_script_has_them(make_trainer, runs):
    profiler = Profiler(
        cyclic_schedule(warmup=0, active=2),
        JSONTraceHandler("elsewhere/traces"),
        sys_prof_cpu=False,
        torch_prof_profile_memory=False,
        torch_prof_with_flops=False,
    )
    with pytest.warns(UserWarning, match="The profiler is enabled"):
        trainer = make_trainer(
            max_duration="1ep", run_name="plum", save_folder="elsewhere/checkpoints", profiler=profiler
        )
    finish(trainer)
    run = read_run(runs / "plum")
    elsewhere = runs.with_name("elsewhere")
    assert [each.path for each in run.checkpoints] == [str(elsewhere / "checkpoints" / "ep1-ba2-rank0.pt")]
    assert run.traces == [str(elsewhere / "traces" / name) for name in ("ep0-ba2-rank0.json", "merged_trace.json")]


def test_a_run_that_only_evaluates_has_finished(make_trainer, make_loader, runs):
    trainer = make_trainer(max_duration="1ep", run_name="plum")
    trainer.eval(make_loader(8, 4))
    trainer.close()
    run = read_run(runs / "plum")
    assert run.status["status"] == "finished"
    assert "metrics/eval/MulticlassAccuracy" in run.curves


def test_the_command_finds_runs_whose_names_are_paths(make_trainer, runs, capsys):
    finish(make_trainer(max_duration="1ep", run_name="fruit/plum"))
    assert main([str(runs), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["fruit/plum"]


def test_what_has_ended_the_process_is_in_the_record_of_a_script_that_closes_nothing(make_trainer, runs, monkeypatch):
    class Fails(Callback):
        def batch_end(self, state, logger):
            raise ArithmeticError("out of numbers")

    trainer = make_trainer(max_duration="1ep", run_name="plum", callbacks=Fails())
    with pytest.raises(ArithmeticError) as caught:
        trainer.fit()
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)  # as Python has it when it ends
    trainer.close()
    status = read_run(runs / "plum").status
    assert status["status"] == "failed"
    assert "ArithmeticError: out of numbers" in status["error"]


def test_an_error_of_something_else_before_is_none_of_the_run(make_trainer, runs, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ArithmeticError("typed at a prompt"), raising=False)
    finish(make_trainer(max_duration="1ep", run_name="plum"))
    assert read_run(runs / "plum").status["status"] == "finished"
