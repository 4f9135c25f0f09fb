"""What was logged stays at hand, with its time."""

from unittest import mock

import pytest
import torch

from composer.core import Callback
from composer.loggers import InMemoryLogger


@pytest.fixture
def logger(make_trainer):
    logger = InMemoryLogger()
    make_trainer(max_duration="3ba", loggers=logger).fit()
    return logger


def test_each_value_is_kept_with_its_time(logger):
    stamps = [int(stamp.batch) for stamp, _ in logger.data["loss/train/total"]]
    assert stamps == [0, 1, 2]
    assert logger.most_recent_values["loss/train/total"] == logger.data["loss/train/total"][-1][1]
    assert int(logger.most_recent_timestamps["loss/train/total"].batch) == 2


def test_a_series_has_the_time_beside_each_value(logger):
    series = logger.get_timeseries("loss/train/total")
    assert series["batch"].tolist() == [0, 1, 2]
    assert series["sample"].tolist() == [0, 4, 8]
    assert series["loss/train/total"].shape == (3,)
    assert series["total_wct"][0] == 0.0
    assert (series["total_wct"][1:] > 0).all()


def test_an_unknown_series(logger):
    with pytest.raises(ValueError, match=r"metric='loss' has not been logged\. Logged were: .*loss/train/total"):
        logger.get_timeseries("loss")


def test_a_spy_that_is_put_on_it_after_the_trainer_was_made_sees_each_call(make_trainer):
    logger = InMemoryLogger()
    trainer = make_trainer(max_duration="3ba", loggers=logger)
    with mock.patch.object(logger, "log_metrics", wraps=logger.log_metrics) as spy:
        trainer.fit()
        steps = [call.args[-1] for call in spy.call_args_list if "loss/train/total" in call.args[-2]]
    assert steps == [0, 1, 2]
    assert [int(stamp.batch) for stamp, _ in logger.data["loss/train/total"]] == [0, 1, 2]


def test_values_are_kept_as_they_were(make_trainer):
    class LogAndChange(Callback):
        def batch_end(self, state, logger):
            value = [int(state.timestamp.batch)]
            logger.log_metrics({"mine": value})
            value.clear()

    logger = InMemoryLogger()
    make_trainer(max_duration="2ba", loggers=logger, callbacks=LogAndChange()).fit()
    assert [value for _, value in logger.data["mine"]] == [[1], [2]]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.1),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor(2**62 + 1),
        torch.tensor(True),
        torch.tensor(1.5, requires_grad=True),
        torch.tensor([0.25]),
        torch.eye(2, dtype=torch.float64),
    ],
    ids=lambda value: f"{value.dtype}-{value.ndim}".removeprefix("torch."),
)
def test_tensors_stay_tensors_whatever_becomes_of_them(make_trainer, value):
    trainer = make_trainer(loggers=InMemoryLogger())
    before = value.detach().clone()
    trainer.logger.log_metrics({"value": value})
    with torch.no_grad():
        value.zero_()
    kept = trainer.logger.destinations[0].most_recent_values["value"]
    assert isinstance(kept, torch.Tensor)
    assert torch.equal(kept, before)
    assert (kept.dtype, kept.shape, kept.requires_grad) == (before.dtype, before.shape, False)


def test_tables_are_kept_as_json(logger):
    logger.log_table(["a"], [["ü"]], name="mine")
    assert logger.tables == {"mine": '{"columns":["a"],"data":[["ü"]]}'}
