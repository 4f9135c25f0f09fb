"""The console shows what was measured, as text, at the interval that was asked for."""

import io
import json
import re

import numpy as np
import pytest
import torch

from composer.core import Callback, Evaluator
from composer.loggers import ConsoleLogger


@pytest.fixture
def run(make_trainer):
    """Train with a console on a stream of memory, and return its lines."""

    def run(interval="1ba", **settings):
        stream = io.StringIO()
        make_trainer(loggers=ConsoleLogger(interval, stream), **settings).fit()
        return stream.getvalue().splitlines()

    return run


def headers(lines):
    return [line for line in lines if line.startswith("[")]


def test_each_block_says_where_training_is(run):
    lines = run(max_duration="2ep")
    assert headers(lines) == [f"[epoch={epoch}][batch={batch}/2]:" for epoch in (1, 2) for batch in (1, 2)]
    assert sum(line.startswith("\t Train loss/train/total: ") for line in lines) == 4
    assert all(re.match(r"\t Train \S+: \S", line) for line in lines[lines.index(headers(lines)[0]) + 1 :][:2])


def test_a_training_that_does_not_count_epochs_says_how_far_it_is_in_its_own_unit(run):
    assert headers(run(max_duration="12sp")) == ["[sample=4/12]:", "[sample=8/12]:", "[sample=12/12]:"]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ("3ba", ["[batch=1/7]:", "[batch=3/7]:", "[batch=6/7]:", "[batch=7/7]:"]),  # the first, and what is left
        ("7ba", ["[batch=1/7]:", "[batch=7/7]:"]),
    ],
)
def test_the_interval_in_batches(run, interval, expected):
    assert headers(run(interval, max_duration="7ba")) == expected


@pytest.mark.parametrize("interval", ["2ep", 2])
def test_the_interval_in_epochs(run, interval):
    # The first epoch is always shown, and says its own number with its last batch.
    lines = headers(run(interval, max_duration="4ep"))
    assert lines == ["[epoch=1][batch=2/2]:", "[epoch=2][batch=2/2]:", "[epoch=4][batch=2/2]:"]


def test_a_value_is_kept_until_the_next_block_also_over_the_end_of_an_epoch(run):
    class LogSometimes(Callback):
        def batch_end(self, state, logger):
            if int(state.timestamp.batch) == 5:
                logger.log_metrics({"seldom": 5.0})

    lines = run("4ba", max_duration="8ba", callbacks=LogSometimes())
    at = lines.index("\t Train seldom: 5.0000")
    assert lines.index("[batch=8/8]:") < at


@pytest.mark.parametrize(("num_batches", "num_lines"), [(1, 0), (3, 2), (12, 10), (30, 10)])
def test_an_evaluation_is_shown_ten_times_at_most_and_at_its_end(run, make_loader, num_batches, num_lines):
    evaluator = Evaluator(label="mine", dataloader=make_loader(num_batches, 1))
    lines = [line for line in run(max_duration="1ep", eval_dataloader=evaluator) if "Eval" in line]
    progress = [line for line in lines if line.startswith("[Eval")]
    assert len(progress) == num_lines + 1
    assert progress[-1] == f"[Eval batch={num_batches}/{num_batches}] Eval on mine data:"
    assert len(lines) == len(progress) + 2  # accuracy and cross entropy
    if num_batches == 12:
        assert progress[0] == "[Eval batch=1/12] Eval on mine data"


def test_the_run_is_described_first_and_once(run):
    lines = run(max_duration="2ep")
    assert lines[0].startswith("Composer ")
    assert sum("seed 3" in line for line in lines) == 1


def test_hyperparameters_of_the_script_are_shown_once_and_those_of_the_trainer_not(make_trainer):
    """A script that had only its log file lost what it had logged with `log_hyperparameters`."""
    stream = io.StringIO()
    trainer = make_trainer(loggers=ConsoleLogger("1ba", stream), max_duration="1ba")
    trainer.logger.log_hyperparameters({"dataset": "digits", "model": {"width": 64}})
    trainer.fit()
    described = [line for line in stream.getvalue().splitlines() if "dataset" in line]
    assert described == ["hyperparameters: dataset=digits, model={'width': 64}"]
    assert "composer_commit_hash" not in stream.getvalue()
    assert trainer.logger.destinations[0].hparams["composer_commit_hash"] == "None"


def test_blocks_of_training_have_losses_and_metrics_and_no_counters(run):
    class Logs(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"throughput": 1.0, "time/total": 2.0})

    lines = run(max_duration="1ba", callbacks=Logs())
    names = {line.split(":")[0] for line in lines if line.startswith("\t")}
    assert names == {"\t Train loss/train/total", "\t Train metrics/train/MulticlassAccuracy", "\t Train throughput"}


def test_after_an_evaluation_comes_the_best_result_so_far(run, make_loader):
    lines = run(max_duration="2ep", eval_dataloader=make_loader(4, 2))
    assert sum(line.startswith("eval at epoch 2: CrossEntropy") and "best" in line for line in lines) == 1


def test_tables_come_with_every_block(run):
    class LogTable(Callback):
        def fit_start(self, state, logger):
            logger.log_table(["a", "b"], [[1, "x"], [2, "y"]], name="mine")

    lines = run(max_duration="2ba", callbacks=LogTable())
    assert lines.count('\t Train mine: {"columns":["a","b"],"data":[[1,"x"],[2,"y"]]}') == 2


def test_a_table_has_what_tensors_and_arrays_hold():
    console = ConsoleLogger(stream=io.StringIO())
    console.log_table(["a", "b"], [[torch.tensor(0.5), np.arange(2)], [{1}, None]], name="mine")
    assert json.loads(console.tables["mine"]) == {"columns": ["a", "b"], "data": [[0.5, [0, 1]], ["{1}", None]]}


def test_the_trainer_makes_one(make_trainer, capsys):
    make_trainer(max_duration="4ba", log_to_console=True, console_stream="stdout", console_log_interval="4ba").fit()
    assert headers(capsys.readouterr().out.splitlines()) == ["[batch=1/4]:", "[batch=4/4]:"]


def test_traces_are_shown_where_they_are_asked_for(make_trainer, capsys):
    from composer.algorithms import GradientClipping

    for log_traces in (False, True):
        make_trainer(
            max_duration="1ba",
            algorithms=GradientClipping("norm", 1.0),
            log_to_console=True,
            log_traces=log_traces,
        ).fit()
        shown = "[trace]: algorithm_traces/GradientClipping/Event.AFTER_TRAIN_BATCH: 1" in capsys.readouterr().err
        assert shown is log_traces


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("3sp",), "must have units of EPOCH or BATCH"),
        (("0ba",), "must be 1 or more"),
        (("1ba", "stdlog"), "stream='stdlog' must be"),
    ],
)
def test_what_a_console_cannot_be(arguments, said):
    with pytest.raises(ValueError, match=said):
        ConsoleLogger(*arguments)


def test_tables_come_with_metrics_and_not_with_each_line_of_progress(make_trainer, make_loader):
    class LogsTable(Callback):
        def eval_start(self, state, logger):
            logger.log_table(["a"], [[1]], name="mine")

    stream = io.StringIO()
    with make_trainer(loggers=ConsoleLogger(stream=stream), callbacks=LogsTable()) as trainer:
        trainer.eval(make_loader(4, 1))
    progress, *rest = [line for line in stream.getvalue().splitlines() if "Eval" in line]
    assert progress.startswith("[Eval batch=1/4]")
    assert sum("mine" in line for line in rest) == 1


def test_what_the_next_block_has_may_be_replaced(make_trainer):
    class Drops(ConsoleLogger):
        def batch_end(self, state, logger):
            self.logged_metrics = {"loss of mine": 0.5}
            super().batch_end(state, logger)

    stream = io.StringIO()
    with make_trainer(loggers=Drops("1ba", stream), max_duration="1ep") as trainer:
        trainer.fit()
    assert "Train loss of mine: 0.5000" in stream.getvalue()
    assert "Train loss/train/total" not in stream.getvalue()
