"""Evaluation in `fit` and by itself."""

import pytest
import torch

from composer.core import Callback, Evaluator, Event
from composer.loggers import InMemoryLogger


def test_metrics_are_those_of_all_samples(make_trainer, make_model, make_loader, make_data):
    model = make_model()
    trainer = make_trainer(model=model, eval_dataloader=make_loader(13, 4))
    trainer.eval()
    inputs, targets = make_data(13).tensors
    with torch.no_grad():
        right = (model.module(inputs).argmax(dim=1) == targets).float().mean()
    assert float(trainer.state.eval_metric_values["MulticlassAccuracy"]) == pytest.approx(float(right))


@pytest.mark.parametrize(
    ("interval", "max_duration", "evaluations"),
    [(1, "5ep", 5), ("2ep", "8ep", 4), ("3ba", "4ep", 3), (0, "2ep", 0), ("0ep", "2ep", 0), ("0.25dur", "4ep", 4)],
)
def test_fit_evaluates_at_its_interval(make_trainer, make_loader, recorder, interval, max_duration, evaluations):
    trainer = make_trainer(
        eval_dataloader=make_loader(4, 4), eval_interval=interval, max_duration=max_duration, loggers=recorder
    )
    trainer.fit()
    assert recorder.count(Event.EVAL_START) == evaluations


def test_a_subset_limits_an_evaluation(make_trainer, make_loader, recorder):
    trainer = make_trainer(eval_dataloader=make_loader(20, 2), eval_subset_num_batches=3, loggers=recorder)
    trainer.eval()
    assert recorder.count(Event.EVAL_BATCH_END) == 3


def test_each_evaluator_reports_under_its_label_the_metrics_it_names(make_trainer, make_loader, recorder):
    evaluators = [
        Evaluator(label="one", dataloader=make_loader(4, 4), metric_names=["MulticlassAccuracy"]),
        Evaluator(label="two", dataloader=make_loader(4, 4), metric_names=["cross.*"]),
    ]
    make_trainer(eval_dataloader=evaluators, loggers=recorder).eval()
    logged = [entry[2] for entry in recorder.seen if entry[0] == "M"]
    assert logged == [("metrics/one/MulticlassAccuracy",), ("metrics/two/CrossEntropy",)]


def test_the_dataloader_of_training_is_back_after_an_evaluation(make_trainer, make_loader):
    trainer = make_trainer(train_subset_num_batches=1, eval_dataloader=make_loader(6, 2), max_duration="2ep")
    trainer.eval()
    assert trainer.state.dataloader_label == "train"
    assert trainer.state.dataloader_len == 1
    trainer.fit()
    assert trainer.state.timestamp.batch == 2


def test_the_model_evaluates_in_eval_mode_and_trains_on_in_train_mode(make_trainer, make_loader):
    modes = []

    class Modes(Callback):
        def eval_before_forward(self, state, logger):
            modes.append(("eval", state.model.training, torch.is_grad_enabled()))

        def before_forward(self, state, logger):
            modes.append(("train", state.model.training, torch.is_grad_enabled()))

    trainer = make_trainer(
        eval_dataloader=make_loader(2, 2), eval_interval="1ba", max_duration="1ep", callbacks=Modes()
    )
    trainer.fit()
    assert modes == [("train", True, True), ("eval", False, False)] * 2


def test_a_dataloader_for_one_call_leaves_no_trace(make_trainer, make_loader):
    trainer = make_trainer()
    trainer.eval(make_loader(4, 2))
    assert list(trainer.state.evaluators) == []
    with pytest.raises(ValueError, match="eval_dataloader must be provided"):
        trainer.eval()


def test_an_empty_evaluation_is_warned_about(make_trainer):
    trainer = make_trainer(eval_dataloader=Evaluator(label="none", dataloader=[], device_eval_microbatch_size=1))
    with pytest.warns(UserWarning, match="No batches were evaluated for global rank 0.*'none'"):
        trainer.eval()


def test_an_evaluator_may_serve_two_trainers(make_trainer, make_loader, recorder):
    evaluator = Evaluator(label="mine", dataloader=make_loader(4, 4))
    make_trainer(eval_dataloader=evaluator, eval_interval="4ep", max_duration="4ep").fit()
    make_trainer(eval_dataloader=evaluator, eval_interval="1ep", max_duration="4ep", loggers=recorder).fit()
    assert recorder.count(Event.EVAL_START) == 4


def test_a_list_of_batches_is_one_dataloader(make_trainer, make_loader):
    evaluator = Evaluator(label="eval", dataloader=list(make_loader(6, 2)), device_eval_microbatch_size=2)
    trainer = make_trainer()
    trainer.eval(evaluator)
    with pytest.raises(AttributeError, match="batch_size"):
        trainer.eval(list(make_loader(6, 2)))


def test_a_label_that_is_taken_is_warned_about(make_trainer, make_loader):
    trainer = make_trainer(eval_dataloader=make_loader(4, 4))
    with pytest.warns(UserWarning, match="eval_dataloader label 'eval' is that of another evaluator"):
        trainer.eval(make_loader(6, 2))


def test_a_model_may_require_the_outputs_of_eval_forward(make_trainer, make_model, make_loader):
    model = make_model()
    model.eval_forward = lambda batch, outputs: model.module(batch[0]) if outputs is None else outputs
    trainer = make_trainer(model=model, eval_dataloader=make_loader(4, 4))
    trainer.eval()
    assert "MulticlassAccuracy" in trainer.state.eval_metric_values


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("when", ["before fit", "in fit"])
def test_an_evaluator_put_into_the_state_evaluates(make_trainer, make_loader, when, is_given):
    """Seen before: `KeyError: 'late'`, or no evaluation at all."""
    late = Evaluator(label="late", dataloader=make_loader(8, 4), metric_names=["MulticlassAccuracy"])
    memory = InMemoryLogger()

    class Put(Callback):
        def fit_start(self, state, logger):
            if when == "in fit":
                state.evaluators.append(late)

    given = {"eval_dataloader": make_loader(8, 4)} if is_given else {}
    trainer = make_trainer(max_duration="2ep", loggers=memory, callbacks=Put(), **given)
    if when == "before fit":
        trainer.state.evaluators += [late]
    trainer.fit()
    assert len(memory.data["metrics/late/MulticlassAccuracy"]) == 2
    assert "metrics/late/CrossEntropy" not in memory.data
    assert ("metrics/eval/CrossEntropy" in memory.data) is is_given
    trainer.state.evaluators.append(make_loader(8, 4)) if not is_given else trainer.state.evaluators.pop(0)
    trainer.eval()
    assert len(memory.data["metrics/late/MulticlassAccuracy"]) == 3
    assert trainer.state.evaluators[0] is late
