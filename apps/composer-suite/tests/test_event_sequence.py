"""What can be observed of a run, in its order: the events, and the calls that log."""

import pytest

from composer.core import Algorithm, Evaluator, Event

MICROBATCH = ["BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS", "AFTER_LOSS", "BEFORE_BACKWARD", "AFTER_BACKWARD"]
FACTS = [
    ("H", ("composer_version",)),
    ("H", ("composer_commit_hash",)),
    ("H", ("num_nodes", "num_cpus_per_node", "node_name")),
    ("H", ("rank_zero_seed",)),
]
TIMES = ("time/batch", "time/sample", "time/batch_in_epoch", "time/sample_in_epoch")
EVALUATION = ["EVAL_START", "EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]


def batch(step, microbatches=2):
    return [
        "BEFORE_DATALOADER",
        "AFTER_DATALOADER",
        "BATCH_START",
        ("M", step, TIMES),
        "BEFORE_TRAIN_BATCH",
        *MICROBATCH * microbatches,
        "AFTER_TRAIN_BATCH",
        ("M", step, ("trainer/device_train_microbatch_size",)),
        ("M", step, ("loss/train/total",)),
        ("M", step, ("metrics/train/MulticlassAccuracy",)),
        "BATCH_END",
        "BATCH_CHECKPOINT",
    ]


def evaluation(step):
    values = ("M", step, ("metrics/eval/CrossEntropy", "metrics/eval/MulticlassAccuracy"))
    return [*EVALUATION, values, "EVAL_END"]


@pytest.fixture
def trainer(make_trainer, make_loader, recorder):
    return make_trainer(
        train_dataloader=make_loader(8, 4),
        device_train_microbatch_size=2,
        max_duration="1ep",
        eval_dataloader=Evaluator(
            label="eval",
            dataloader=make_loader(4, 4),
            metric_names=["CrossEntropy", "MulticlassAccuracy"],
            subset_num_batches=1,
            eval_interval="1ep",
        ),
        loggers=recorder,
    )


def test_construction_fires_init_then_logs_the_facts_then_passes_the_load_events(trainer, recorder):
    assert recorder.seen == ["INIT", *FACTS, "BEFORE_LOAD", "AFTER_LOAD"]


def test_fit_of_one_epoch(trainer, recorder):
    recorder.seen.clear()
    trainer.fit()
    assert recorder.seen == [
        ("H", ()),
        "FIT_START",
        "ITERATION_START",
        "EPOCH_START",
        ("M", 0, ("time/epoch",)),
        *batch(0),
        *batch(1),
        "BEFORE_DATALOADER",
        ("M", 2, ("metrics/train/MulticlassAccuracy",)),
        "EPOCH_END",
        "EVAL_BEFORE_ALL",
        *evaluation(2),
        "EVAL_AFTER_ALL",
        "EPOCH_CHECKPOINT",
        ("M", 2, ("time/epoch", *TIMES)),
        "FIT_END",
    ]


def test_another_batch_after_the_first_epoch(trainer, recorder):
    trainer.fit()
    recorder.seen.clear()
    trainer.fit(duration="1ba")
    assert recorder.seen == [
        ("H", ()),
        "FIT_START",
        "EPOCH_START",
        ("M", 2, ("time/epoch",)),
        *batch(2),
        ("M", 3, ("time/epoch", *TIMES)),
        "FIT_END",
        "EVAL_BEFORE_ALL",
        *evaluation(3),
        "EVAL_AFTER_ALL",
    ]


def test_standalone_evaluation(trainer, recorder):
    trainer.fit()
    recorder.seen.clear()
    trainer.eval()
    assert recorder.seen == ["EVAL_STANDALONE_START", *evaluation(2), "EVAL_STANDALONE_END"]


def test_algorithms_that_take_part_are_logged(make_trainer, recorder):
    class Idle(Algorithm):
        def match(self, event, state):
            return False

        def apply(self, event, state, logger):
            pass

    make_trainer(algorithms=Idle(), max_duration="1ba", loggers=recorder).fit()
    assert ("H", ("enabled_algorithms/Idle",)) in recorder.seen


def test_training_in_steps_of_one_batch_crosses_epochs_as_one_fit_does(make_trainer, recorder):
    trainer = make_trainer(max_duration="1ba", loggers=recorder)
    trainer.fit()
    for _ in range(3):
        trainer.fit(duration="1ba")
    assert recorder.count(Event.EPOCH_START) == 2
    assert recorder.count(Event.EPOCH_END) == 2
    assert recorder.count(Event.BATCH_END) == 4


def test_before_dataloader_fires_once_more_than_there_are_batches(make_trainer, recorder):
    make_trainer(max_duration="3ep", loggers=recorder).fit()
    assert recorder.count(Event.BEFORE_DATALOADER) == 3 * (2 + 1)
    assert recorder.count(Event.AFTER_DATALOADER) == 3 * 2
