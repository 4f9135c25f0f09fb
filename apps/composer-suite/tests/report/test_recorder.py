"""The folder that a run leaves, and the data of the page about it."""

import contextlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from composer import Trainer
from composer.algorithms import GradientClipping, LabelSmoothing
from composer.callbacks import ThresholdStopper
from composer.core import Algorithm, Callback, Engine, Evaluator, Event, State, Time
from composer.loggers._service_queue import Snapshot
from composer.models import ComposerClassifier, ComposerModel
from composer.report import RunRecorder, read_run
from composer.report.cli import main
from composer.report.runs import describe_runs, largest_triangles


class Logs(Callback):
    def __init__(self, values):
        self.values = values

    def batch_start(self, state, logger):
        logger.log_metrics({"own/value": self.values[int(state.timestamp.batch)]})


class StopsAt(Callback):
    def __init__(self, batch, error=None):
        self.batch, self.error = batch, error

    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == self.batch:
            if self.error is not None:
                raise self.error
            state.stop_training()


def train(folder, run_name="run", **more):
    with make_trainer(folder, run_name, **more) as trainer:
        trainer.fit()


def make_trainer(folder, run_name="run", *, model=None, **more):
    data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long)) for _ in range(4)]
    torch.manual_seed(0)
    model = model or ComposerModel.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
    settings = {
        "train_dataloader": data,
        "device_train_microbatch_size": 4,
        "max_duration": "2ep",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": "cpu",
        "progress_bar": False,
        "loggers": RunRecorder(f"{folder}/{{run_name}}", page=False),
        "run_name": run_name,
    }
    return Trainer(model, **settings | more)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_its_metrics_its_configuration_and_how_it_ended(tmp_path):
    values = torch.arange(8.0)
    train(tmp_path, callbacks=Logs(values), auto_log_hparams=True, algorithms=GradientClipping("norm", 1.0))
    run = read_run(tmp_path / "run")
    assert run.curves["own/value"].values == values.tolist()
    assert run.curves["own/value"].at["batch"] == list(range(8))
    assert run.curves["own/value"].at["epoch"] == [0] * 4 + [1] * 4
    assert run.curves["own/value"].at["sample"] == [4 * batch for batch in range(8)]
    assert len(run.curves["loss/train/total"].values) == 8
    assert run.config["max_duration"] == "2ep"
    assert (run.config["environment"]["device"], run.config["environment"]["world_size"]) == ("cpu", 1)
    assert (run.status["status"], run.status["batch"], run.status["error"]) == ("finished", 8, None)
    assert run.acting["GradientClipping on after_train_batch"] == {"count": 8, "batches": [[0, 7]]}
    assert min(run.times["step"][part] for part in ("waiting for data", "forward", "loss", "backward")) > 0
    assert run.num_bad_lines == 0


def test_values_are_those_of_the_time_when_they_were_logged(tmp_path):
    class Changes(Callback):
        def __init__(self):
            self.value = torch.zeros(())

        def batch_end(self, state, logger):
            self.value += 1
            logger.log_metrics({"own/value": self.value})

    train(tmp_path, callbacks=Changes())
    assert read_run(tmp_path / "run").curves["own/value"].values == [float(n) for n in range(1, 9)]


def test_what_is_logged_at_one_time_is_one_line_unless_a_name_comes_twice(tmp_path):
    class LogsTwice(Callback):
        def batch_start(self, state, logger):
            for value in (1.0, 2.0):
                logger.log_metrics({"own/value": value})
            logger.log_metrics({"own/text": "no number", "own/several": torch.ones(3)})

    train(tmp_path, callbacks=LogsTwice(), max_duration="1ep")
    assert read_run(tmp_path / "run").curves["own/value"].values == [1.0, 2.0] * 4
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["batch"] for line in found if "own/value" in line["metrics"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(found) == 9  # and the time after the last batch
    assert not any("own/text" in line["metrics"] or "own/several" in line["metrics"] for line in found)


def test_a_device_that_has_failed_costs_its_own_values_only(tmp_path, monkeypatch):
    class Arrival:
        def query(self):
            raise RuntimeError("device-side assert triggered")

        synchronize = query

    class Failed(Snapshot):
        def __init__(self, values):
            super().__init__(values)
            self._arrivals = {None: Arrival()}

    monkeypatch.setattr("composer.report._run_files.Snapshot", Failed)
    monkeypatch.setattr(Snapshot, "_take", lambda self, value: value)
    train(tmp_path, callbacks=Logs(torch.ones(8, device="meta")))
    run = read_run(tmp_path / "run")
    assert "own/value" not in run.curves
    assert (len(run.curves["loss/train/total"].values), run.status["status"]) == (8, "finished")


def test_a_run_that_fails_says_why_and_keeps_what_it_logged(tmp_path):
    with pytest.raises(ArithmeticError):
        train(tmp_path, callbacks=[Logs(torch.ones(8)), StopsAt(3, ArithmeticError("out of numbers"))])
    run = read_run(tmp_path / "run")
    assert run.status["status"] == "failed"
    assert "ArithmeticError: out of numbers" in run.status["error"]
    assert len(run.curves["own/value"].values) == 3


def test_a_failure_is_written_down_before_anybody_closes(tmp_path):
    trainer = make_trainer(
        tmp_path, callbacks=[Logs(torch.ones(8)), StopsAt(3, ArithmeticError("out of numbers"))], max_duration="2ep"
    )
    with pytest.raises(ArithmeticError):
        trainer.fit()
    run = read_run(tmp_path / "run")
    trainer.close()
    assert run.status["status"] == "failed"
    assert "ArithmeticError: out of numbers" in run.status["error"]
    assert len(run.curves["own/value"].values) == 3


def test_what_others_log_while_they_close_is_in_the_record(tmp_path):
    class LogsAtTheEnd(Callback):
        def close(self, state, logger):
            logger.log_metrics({"own/last": 5})
            logger.log_hyperparameters({"own": 7})

    train(tmp_path, callbacks=LogsAtTheEnd())
    run = read_run(tmp_path / "run")
    assert list(run.curves["own/last"].values) == [5]
    assert json.loads((tmp_path / "run/config.json").read_text())["own"] == 7
    assert run.status["status"] == "finished"


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("trainer.fit(duration='nonsense')", "failed"),
        ("raise ArithmeticError('between the Trainer and its training')", "failed"),
        ("trainer.fit(); raise ArithmeticError('after training')", "finished"),
        ("trainer.close(); raise ArithmeticError('after closing')", "stopped early"),
    ],
)
def test_a_script_that_dies_before_it_trains_has_failed(tmp_path, ending, status):
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import pathlib\n"
        f"from test_recorder import make_trainer; trainer = make_trainer(pathlib.Path({str(tmp_path)!r}))\n{ending}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    written = read_run(tmp_path / "run").status
    assert written["status"] == status
    assert (written["error"] is not None) == (status == "failed")


def test_a_script_that_is_begun_again_after_its_end_leaves_the_record_finished(tmp_path):
    settings = {"save_folder": str(tmp_path / "saved"), "autoresume": True, "max_duration": "1ep"}
    train(tmp_path, **settings)
    train(tmp_path, **settings)
    assert read_run(tmp_path / "run").status["status"] == "finished"


def test_refused_arguments_are_no_end_of_a_training(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit()
    with pytest.raises(ValueError, match="nonsense"):
        trainer.fit(duration="nonsense")
    trainer.close()
    assert read_run(tmp_path / "run").status["status"] == "finished"


def test_what_nobody_caught_before_a_run_is_not_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ArithmeticError("of an earlier cell"), raising=False)
    make_trainer(tmp_path).close()
    assert read_run(tmp_path / "run").status["status"] == "stopped early"


def test_a_run_that_is_closed_before_it_does_anything_has_not_finished(tmp_path):
    script = (
        f"import os, signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import pathlib\n"
        f"from test_recorder import make_trainer; trainer = make_trainer(pathlib.Path({str(tmp_path)!r}))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    written = read_run(tmp_path / "run").status
    assert (written["status"], written["error"]) == ("stopped early", None)
    assert "before it had trained, evaluated or predicted" in written["reason"]


class Fails(Callback):
    def fit_start(self, state, logger):
        raise ArithmeticError("at the start")


@pytest.mark.parametrize(
    ("callbacks", "status", "told"),
    [
        (StopsAt(6), ("stopped early", None), "reason"),
        (StopsAt(6, ArithmeticError("on the way")), ("failed", "on the way"), "error"),
        (None, ("finished", None), None),
    ],
    ids=["stopped", "failed", "finished"],
)
@pytest.mark.parametrize("looks", [False, True], ids=["closed", "evaluated"])
def test_whoever_only_looks_at_a_run_does_not_change_how_it_has_ended(tmp_path, callbacks, status, told, looks):
    settings = {"save_folder": str(tmp_path / "saved"), "save_interval": "1ba", "autoresume": True}
    with contextlib.suppress(ArithmeticError):
        train(tmp_path, callbacks=callbacks, **settings)
    before = read_run(tmp_path / "run").status
    assert (before["status"], "on the way" in (before["error"] or "")) == (status[0], status[1] is not None)
    with make_trainer(tmp_path, **settings) as trainer:
        if looks:
            data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]
            trainer.eval(Evaluator(label="eval", dataloader=data, device_eval_microbatch_size=4))
    after = read_run(tmp_path / "run").status
    assert [after[name] for name in ("status", "reason", "error")] == [
        before[name] for name in ("status", "reason", "error")
    ]
    assert told is None or before[told]


def test_a_killed_run_that_is_only_looked_at_has_stopped_early(tmp_path):
    settings = {"save_folder": str(tmp_path / "saved"), "save_interval": "1ba", "autoresume": True}
    train(tmp_path, callbacks=StopsAt(6), **settings)
    path = tmp_path / "run/status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "running", "reason": None}))
    make_trainer(tmp_path, **settings).close()
    after = read_run(tmp_path / "run").status
    assert (after["status"], after["reason"]) == (
        "stopped early",
        "it was closed before it had gone on with its training",
    )


def test_a_run_that_has_failed_at_once_gives_no_other_reason(tmp_path):
    with pytest.raises(ArithmeticError, match="at the start"):
        train(tmp_path, callbacks=Fails())
    written = read_run(tmp_path / "run").status
    assert (written["status"], written["reason"]) == ("failed", None)


def test_a_loop_of_ones_own_that_only_ends_batches_has_finished(tmp_path):
    state = State(model=torch.nn.Linear(1, 1), rank_zero_seed=0, run_name="own", device="cpu", callbacks=[])
    state.callbacks.append(RunRecorder(tmp_path / "run", page=False))
    state.set_dataloader([1, 2], "train")
    state.max_duration = "1ep"
    engine = Engine(state)
    engine.run_event(Event.INIT)
    for _ in range(2):
        state.timestamp = state.timestamp.to_next_batch(samples=1)
        engine.run_event(Event.BATCH_END)
    engine.close()
    assert read_run(tmp_path / "run").status["status"] == "finished"


class Odd:
    def __float__(self):
        raise ZeroDivisionError

    def __str__(self):
        raise ZeroDivisionError


def test_values_steps_and_settings_of_any_kind_cost_only_themselves(tmp_path):
    class LogsOddly(Callback):
        def fit_start(self, state, logger):
            circular = {}
            circular["itself"] = circular
            logger.log_hyperparameters({"weights": {(0, 1): 2.0}, "circular": circular, "odd": Odd(), "lr": 0.1})

        def batch_start(self, state, logger):
            for step in (numpy.int64(3), torch.tensor(3), Time(3, "ba"), "three"):
                logger.log_metrics({f"own/{type(step).__name__}": 1.0}, step=step)
            logger.log_metrics({"own/huge": 2**2000, "own/odd": Odd(), ("own", "pair"): 0.5, "own/value": 1.0})

    train(tmp_path, callbacks=LogsOddly(), max_duration="1ep")
    run = read_run(tmp_path / "run")
    assert run.status["status"] == "finished"
    assert (run.config["weights"], run.config["lr"]) == ({"(0, 1)": 2.0}, 0.1)
    for name in ("own/int64", "own/Tensor", "own/Time"):
        assert run.curves[name].at["batch"] == [3.0] * 4
    for name in ("own/str", "('own', 'pair')", "own/value"):
        assert run.curves[name].at["batch"] == [0.0, 1.0, 2.0, 3.0]
    assert "own/odd" not in run.curves
    assert "own/huge" not in run.curves


def test_slow_batches_are_on_the_disk_after_a_while(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("composer.report.recorder.time.monotonic", lambda: clock[0])
    seen = []

    class IsSlow(Callback):
        def batch_start(self, state, logger):
            clock[0] += 4.0
            seen.append(len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))

    train(tmp_path, callbacks=IsSlow(), max_duration="1ep")
    assert seen == [0, 0, 0, 3]


def test_a_run_that_was_stopped_says_so_and_why(tmp_path):
    stopper = ThresholdStopper("MulticlassAccuracy", "train", -1.0, stop_on_batch=True)
    train(tmp_path, "good", model=ComposerClassifier(torch.nn.Linear(3, 2), num_classes=2), callbacks=stopper)
    train(tmp_path, callbacks=StopsAt(3))
    train(tmp_path, "whole", callbacks=StopsAt(8))
    good, stopped, whole = (read_run(tmp_path / name).status for name in ("good", "run", "whole"))
    assert good["status"] == stopped["status"] == "stopped early"
    assert good["reason"].startswith("ThresholdStopper: train/MulticlassAccuracy is ")
    assert stopped["reason"] == "training has ended at 3ba, and was to be 2ep long"
    assert (whole["status"], whole["reason"]) == ("finished", None)


def test_a_stopped_run_that_is_started_again_says_still_why_it_has_ended(tmp_path):
    """It trains nothing, and was told to have finished."""
    settings = {"save_folder": str(tmp_path / "checkpoints"), "autoresume": True}
    train(tmp_path, callbacks=StopsAt(3), **settings)
    train(tmp_path, **settings)
    status = read_run(tmp_path / "run").status
    assert status["status"] == "stopped early"
    assert status["reason"] == "training has ended at 3ba, and was to be 2ep long"


def test_what_ended_a_run_is_told_also_where_somebody_caught_it(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=StopsAt(3, ArithmeticError("out of numbers")))
    with pytest.raises(ArithmeticError):
        trainer.fit()
    trainer.close()
    status = read_run(tmp_path / "run").status
    assert status["status"] == "failed"
    assert "ArithmeticError: out of numbers" in status["error"]


def test_an_evaluation_that_failed_is_forgotten_when_one_has_ended_well(tmp_path):
    good = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]
    bad = Evaluator(label="eval", dataloader=[(torch.ones(4, 9), good[0][1])], device_eval_microbatch_size=4)
    trainer = make_trainer(tmp_path, max_duration="1ep")
    trainer.fit()
    with pytest.raises(RuntimeError):
        trainer.eval(bad)
    trainer.eval(Evaluator(label="eval", dataloader=good, device_eval_microbatch_size=4))
    trainer.close()
    assert read_run(tmp_path / "run").status["status"] == "finished"
    again = make_trainer(tmp_path, "bad", max_duration="1ep")
    with pytest.raises(RuntimeError):
        again.eval(bad)
    again.close()
    assert "shapes cannot be multiplied" in read_run(tmp_path / "bad").status["error"]


def test_only_who_has_stopped_this_training_says_why(tmp_path):
    class Talks(Callback):
        stop_reason = "said before it began"

    class Raises(Callback):
        @property
        def stop_reason(self):
            raise RuntimeError("not stopped")

    class Stops(LabelSmoothing):
        def apply(self, event, state, logger):
            super().apply(event, state, logger)
            if int(state.timestamp.batch) == 2:
                self.stop_reason = "two are enough"
                state.stop_training()

    train(tmp_path, callbacks=[Talks(), Raises()], algorithms=Stops(0.1))
    assert read_run(tmp_path / "run").status["reason"] == "Stops: two are enough"


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for folder in ("a", "b"):
        train(tmp_path / folder, "dup", max_duration="1ba")
    train(tmp_path, "other", max_duration="1ba")
    (tmp_path / "a" / "dup").rename(tmp_path / "a" / "dup-2")
    folders = [tmp_path / "other", tmp_path / "a" / "dup-2", tmp_path / "b" / "dup"]
    names = [run["name"] for run in describe_runs(folders)["runs"]]
    assert names == ["other", "dup (dup-2)", "dup (dup)"]


def test_checkpoints_are_listed_with_what_is_known_of_them(tmp_path):
    train(tmp_path, save_folder=str(tmp_path / "checkpoints"))
    first, second = read_run(tmp_path / "run").checkpoints
    assert first.path.endswith("ep1-ba4-rank0.pt")
    assert first.verification == "has a manifest, not verified here"
    assert second.size_bytes > 0
    assert [each.verification for each in read_run(tmp_path / "run", verify=True).checkpoints] == ["verified"] * 2
    damage(tmp_path / "checkpoints" / "ep1-ba4-rank0.pt")
    (tmp_path / "checkpoints" / "ep2-ba8-rank0.pt").unlink()
    first, second = read_run(tmp_path / "run", verify=True).checkpoints
    assert first.verification.startswith("damaged: ")
    assert second.verification == "not there any more"


def test_a_folder_that_was_moved_still_knows_its_checkpoints_and_traces(tmp_path):
    train(
        tmp_path,
        save_folder=str(tmp_path / "run" / "checkpoints"),
    )
    (tmp_path / "run" / "traces").mkdir()
    (tmp_path / "run" / "traces" / "merged_trace.json").write_text("[]")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    run = describe_runs([tmp_path / "elsewhere"])["runs"][0]
    assert run["checkpoints"][0]["path"] == str(tmp_path / "elsewhere" / "checkpoints" / "ep1-ba4-rank0.pt")
    assert run["checkpoints"][0]["verification"] == "has a manifest, not verified here"
    assert run["traces"] == [str(tmp_path / "elsewhere" / "traces" / "merged_trace.json")]


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_copied_folder_is_asked_for_its_own_checkpoints_and_traces(tmp_path):
    train(tmp_path, save_folder=str(tmp_path / "run" / "checkpoints"))
    (tmp_path / "run" / "traces").mkdir()
    (tmp_path / "run" / "traces" / "merged_trace.json").write_text("[]")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    status["traces"] = [str(tmp_path / "run" / "traces" / "merged_trace.json")]
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / "run", copied)
    damage(copied / "checkpoints" / "ep1-ba4-rank0.pt")
    (copied / "checkpoints" / "ep2-ba8-rank0.pt").unlink()
    original, copy = (read_run(folder, verify=True) for folder in (tmp_path / "run", copied))
    assert [each.verification for each in original.checkpoints] == ["verified", "verified"]
    assert copy.checkpoints[0].path == str(copied / "checkpoints" / "ep1-ba4-rank0.pt")
    assert copy.checkpoints[0].verification.startswith("damaged: ")
    assert copy.checkpoints[1].path == original.checkpoints[1].path  # the copy has none
    assert copy.traces == [str(copied / "traces" / "merged_trace.json")]


def test_a_run_that_goes_on_in_a_copied_folder_lists_the_checkpoints_there(tmp_path):
    saving = {"save_folder": str(tmp_path / "run" / "checkpoints"), "autoresume": True}
    train(tmp_path, **saving)
    shutil.copytree(tmp_path / "run", tmp_path / "copied" / "run")
    saving["save_folder"] = str(tmp_path / "copied" / "run" / "checkpoints")
    train(tmp_path / "copied", **saving, max_duration="3ep")
    copied = read_run(tmp_path / "copied" / "run")
    folders = {each.path.removeprefix(str(tmp_path)).rpartition("/")[0] for each in copied.checkpoints}
    assert (len(copied.checkpoints), folders) == (3, {"/copied/run/checkpoints"})


def test_checkpoints_in_a_store_are_listed_by_their_address(tmp_path):
    store = (tmp_path / "store").as_uri()
    train(tmp_path, save_folder=f"{store}/{{run_name}}", save_interval="2ep")
    assert (tmp_path / "store" / "run" / "ep2-ba8-rank0.pt").exists()
    (checkpoint,) = read_run(tmp_path / "run").checkpoints
    assert (checkpoint.path, checkpoint.verification) == (
        f"{store}/run/ep2-ba8-rank0.pt",
        "in a store, not looked at here",
    )


def test_an_earlier_run_is_left_alone_unless_it_may_be_replaced(tmp_path):
    train(tmp_path, callbacks=Logs(torch.ones(8)))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="holds an earlier one"):
        train(tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    train(tmp_path, loggers=RunRecorder(f"{tmp_path}/{{run_name}}", page=False, overwrite=True))
    assert "own/value" not in read_run(tmp_path / "run").curves


def test_a_resumed_run_goes_on_in_its_folder(tmp_path):
    saving = {"save_folder": str(tmp_path / "checkpoints"), "autoresume": True, "callbacks": Logs(torch.arange(12.0))}
    train(tmp_path, **saving)
    train(tmp_path, **saving | {"callbacks": Logs(torch.arange(12.0)), "max_duration": "3ep"})
    assert read_run(tmp_path / "run").curves["own/value"].values == [float(n) for n in range(12)]


def test_what_a_killed_run_did_after_its_checkpoint_is_there_once_when_it_goes_on(tmp_path):
    saving = {"save_folder": str(tmp_path / "checkpoints"), "autoresume": True, "max_duration": "3ep"}
    acting = {"algorithms": GradientClipping("norm", 1.0)}
    with pytest.raises(ArithmeticError):
        train(tmp_path, **saving, **acting, callbacks=[Logs(torch.arange(12.0)), StopsAt(6, ArithmeticError())])
    started = read_run(tmp_path / "run").status["started"]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"batch": 6, "metr')  # where the process was killed
    train(tmp_path, **saving, **acting, callbacks=Logs(torch.arange(12.0)))
    run = read_run(tmp_path / "run")
    assert run.curves["own/value"].values == run.curves["own/value"].at["batch"] == list(range(12))
    assert run.curves["loss/train/total"].at["batch"] == list(range(12))
    assert run.acting["GradientClipping on after_train_batch"] == {"count": 12, "batches": [[0, 11]]}
    assert [each.path.rpartition("/")[2][:3] for each in run.checkpoints] == ["ep1", "ep2", "ep3"]
    assert (run.num_bad_lines, run.status["status"], run.status["started"]) == (0, "finished", started)


def test_without_a_launcher_rank_0_accounts_for_the_time_of_each_attempt(tmp_path):
    saves = {"save_folder": str(tmp_path / "saved"), "save_interval": "1ep", "autoresume": True}
    with pytest.raises(ArithmeticError):
        train(tmp_path, callbacks=StopsAt(6, ArithmeticError("out of numbers")), **saves)
    train(tmp_path, **saves)
    first, second = read_run(tmp_path / "run").attempts
    assert [(each["first_batch"], each["batch"], each["ending"]) for each in (first, second)] == [
        (0, 6, "failed"),
        (4, 8, "finished"),
    ]
    for each in (first, second):
        # A float holds seconds since 1970 to a quarter of a microsecond.
        assert sum(each["seconds"].values()) == pytest.approx(each["updated"] - each["started"], abs=1e-6)
        assert min(each["seconds"][part] for part in ("start", "data", "train", "backward", "checkpoint")) > 0
    (found,) = [run["goodput"] for run in describe_runs([tmp_path / "run"])["runs"]]
    assert (found["lost_batches"], found["num_launches"]) == (2, 2)
    assert found["total_s"] + found["between_launches_s"] == pytest.approx(second["updated"] - first["started"])


def test_a_new_run_in_the_folder_of_an_earlier_one_has_no_attempts_of_it(tmp_path):
    train(tmp_path)
    train(tmp_path, loggers=RunRecorder(str(tmp_path / "run"), overwrite=True, page=False))
    assert len(read_run(tmp_path / "run").attempts) == 1


def test_a_second_run_of_the_name_takes_nothing_from_the_one_that_goes_on(tmp_path):
    saving = {"save_folder": str(tmp_path / "checkpoints"), "autoresume": True}
    train(tmp_path, **saving, callbacks=Logs(torch.ones(8)))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    holder = "import sys; from composer_checkpoint import FolderLock; lock = FolderLock(sys.argv[1]).acquire()"
    command = [sys.executable, "-c", f"{holder}; print('held', flush=True); sys.stdin.read()", str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(FileExistsError, match="belongs to a run that has not ended"):
            train(tmp_path, **saving, max_duration="3ep")
        optional = RunRecorder(f"{tmp_path}/{{run_name}}", page=False, is_optional=True)
        with pytest.warns(RuntimeWarning, match="leaves no record"):
            train(tmp_path, **saving, max_duration="3ep", loggers=optional)
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
        other.stdin.close()
    train(tmp_path, **saving, max_duration="4ep")
    assert read_run(tmp_path / "run").curves["loss/train/total"].at["batch"] == [*range(8), *range(12, 16)]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_its_files_anew(tmp_path):
    saving = {"save_folder": str(tmp_path / "checkpoints"), "autoresume": True, "max_duration": "1ep"}
    with pytest.raises(ArithmeticError):
        train(tmp_path, **saving, callbacks=[Logs(torch.ones(4)), StopsAt(2, ArithmeticError())])
    train(tmp_path, **saving, callbacks=Logs(torch.arange(4.0)))
    assert read_run(tmp_path / "run").curves["own/value"].values == list(range(4))


def test_a_line_that_was_cut_off_is_counted_and_left_out(tmp_path):
    train(tmp_path, callbacks=Logs(torch.ones(8)))
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    (tmp_path / "run" / "status.json").unlink()
    run = read_run(tmp_path / "run")
    assert (run.num_bad_lines, run.status) == (1, {})


def test_files_that_something_else_has_spoilt_are_no_reason_to_show_nothing(tmp_path):
    train(tmp_path, callbacks=Logs(torch.ones(8)))
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"batch": NaN, "metrics": {"own/value": 1}}\n\xff\x00\n')
    (tmp_path / "run" / "status.json").write_text('{"checkpoints": 3, "traces": [4]}')
    run = read_run(tmp_path / "run")
    assert (run.num_bad_lines, run.checkpoints, run.traces) == (2, [], [])
    assert run.curves["own/value"].values == [1.0] * 8


def test_what_is_not_finite_is_marked(tmp_path):
    train(tmp_path, callbacks=Logs([1.0, math.nan, math.inf, 4.0, 5.0, 6.0, 7.0, 8.0]))
    curve = describe_runs([tmp_path / "run"])["runs"][0]["curves"]["own/value"]
    assert curve["values"] == [1.0, None, None, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert curve["not_finite"] == {"1": "nan", "2": "inf"}


def test_long_curves_keep_their_peaks_in_few_points(tmp_path):
    x = range(10_000)
    y = [math.sin(n / 500) for n in x]
    y[3_333], y[7_000] = 9.0, math.nan
    kept = largest_triangles(x, y, 50)
    assert len(kept) == 51
    assert {0, 3_333, 7_000, 9_999} <= set(kept)
    assert kept == sorted(kept)


@pytest.mark.parametrize("num_points", [1, 2, 3, 7, 100])
def test_short_curves_stay_whole(num_points):
    assert largest_triangles(range(num_points), [0.0] * num_points, 100) == list(range(num_points))


def test_acting_takes_little_memory_however_long_the_run_is():
    from composer.report._run_files import Acting

    acting = Acting()
    for batch in range(0, 100_000, 3):
        acting.add("SelectiveBackprop on after_dataloader", batch)
    found = acting.as_dict()["SelectiveBackprop on after_dataloader"]
    assert found["count"] == len(range(0, 100_000, 3))
    assert len(found["batches"]) <= 500
    assert (found["batches"][0][0], found["batches"][-1][1]) == (0, 99_999)


class ActsOn(Algorithm):
    """Acts on some events, or on all."""

    def __init__(self, *events):
        self.events = events

    def match(self, event, state):
        return event in self.events or not self.events

    def apply(self, event, state, logger):
        pass


def test_who_acts_after_a_batch_acts_in_that_batch(tmp_path):
    good = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]
    evaluator = Evaluator(label="eval", dataloader=good, device_eval_microbatch_size=4)
    train(tmp_path, algorithms=ActsOn(), eval_dataloader=evaluator, eval_interval="1ep")
    found = {
        name.removeprefix("ActsOn on "): each["batches"] for name, each in read_run(tmp_path / "run").acting.items()
    }
    for event in ("batch_start", "before_forward", "after_train_batch", "batch_end", "batch_checkpoint"):
        assert found[event] == [[0, 7]], event
    for event in ("epoch_end", "epoch_checkpoint", "eval_before_all", "eval_batch_end", "eval_after_all"):
        assert found[event] == [[3, 3], [7, 7]], event
    assert (found["fit_start"], found["epoch_start"], found["fit_end"]) == ([[0, 0]], [[0, 0], [4, 4]], [[7, 7]])


def test_who_acts_in_an_evaluation_before_any_batch_acts_in_the_first(tmp_path):
    good = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]
    with make_trainer(tmp_path, algorithms=ActsOn(Event.EVAL_START)) as trainer:
        trainer.eval(Evaluator(label="eval", dataloader=good, device_eval_microbatch_size=4))
    assert read_run(tmp_path / "run").acting["ActsOn on eval_start"]["batches"] == [[0, 0]]


@pytest.mark.parametrize(
    ("event", "part"),
    [
        ("batch_start", "waiting for data"),
        ("before_train_batch", "preparing the batch"),
        ("before_forward", "preparing the batch"),
        ("after_forward", "forward"),
        ("before_loss", "loss"),
        ("after_loss", "loss"),
        ("before_backward", "backward"),
        ("after_backward", "backward"),
        ("after_train_batch", "after backward"),
        ("batch_end", "callbacks"),
    ],
)
def test_a_slow_callback_belongs_to_the_part_that_its_event_is_in_or_ends(tmp_path, monkeypatch, event, part):
    clock = [0.0]
    monkeypatch.setattr("composer.report._run_files.time.perf_counter", lambda: clock[0])

    class IsSlow(Callback):
        def run_event(self, happens, state, logger):
            clock[0] += 2.0 * (happens.value == event)

    train(tmp_path, callbacks=IsSlow())
    took = read_run(tmp_path / "run").times["step"]
    assert {name: seconds for name, seconds in took.items() if seconds} == {part: 16.0}


def test_a_slow_step_belongs_to_the_optimizer(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("composer.report._run_files.time.perf_counter", lambda: clock[0])

    class IsSlow(torch.optim.SGD):
        def step(self, closure=None):
            clock[0] += 2.0
            return super().step(closure)

    model = ComposerModel.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
    train(tmp_path, model=model, optimizers=IsSlow(model.parameters(), lr=0.1))
    took = read_run(tmp_path / "run").times["step"]
    assert {name: seconds for name, seconds in took.items() if seconds} == {"optimizer": 16.0}


def test_the_command_prints_the_data_of_all_runs_of_a_folder(tmp_path, capsys):
    train(tmp_path, "one", algorithms=LabelSmoothing(0.1))
    train(tmp_path, "two")
    assert main([str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in data["runs"]] == ["one", "two"]


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert f"{str(tmp_path)!r} holds no run" in capsys.readouterr().err


def test_the_recorder_can_be_imported_before_the_trainer():
    subprocess.run([sys.executable, "-c", "from composer.report import RunRecorder"], check=True)


def test_a_flush_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="flush_interval=0 must be 1 or more"):
        RunRecorder(flush_interval=0)
