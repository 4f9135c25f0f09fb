"""What the progress bar shows on a stream."""

import io
import re

import pytest

from composer.loggers import ProgressBarLogger


@pytest.fixture
def shown(make_trainer, make_loader):
    """Train with a progress bar on a stream and return what was written, carriage returns as new lines."""

    def show(**settings):
        stream = io.StringIO()
        trainer = make_trainer(progress_bar=True, console_stream=stream, **settings)
        trainer.fit()
        trainer.close()
        return stream.getvalue().replace("\r", "\n")

    return show


def test_each_epoch_has_a_bar_that_ends_full(shown):
    text = shown(max_duration="2ep")
    assert re.search(r"train\s+Epoch   0: .*2/2", text)
    assert re.search(r"train\s+Epoch   1: .*2/2", text)


def test_a_duration_in_batches_has_one_bar(shown):
    text = shown(max_duration="3ba")
    assert re.search(r"train\s+Batch\s*: .*3/3", text)
    assert "Epoch" not in text


def test_the_final_loss_is_beside_the_bar(shown):
    assert re.search(r"loss/train/total=0\.\d+", shown(max_duration="1ep"))


def test_an_evaluation_has_a_bar_with_its_metrics(shown, make_loader):
    text = shown(max_duration="1ep", eval_dataloader=make_loader(6, 2))
    assert re.search(r"eval\s+Epoch   0: .*3/3.*CrossEntropy=\d.*MulticlassAccuracy=\d", text)


def test_a_bar_given_as_logger_is_not_doubled(make_trainer):
    with pytest.warns(UserWarning, match="already holds a ProgressBarLogger"):
        trainer = make_trainer(progress_bar=True, loggers=ProgressBarLogger(io.StringIO()))
    assert sum(isinstance(callback, ProgressBarLogger) for callback in trainer.state.callbacks) == 1


def test_an_unknown_stream_is_refused():
    with pytest.raises(ValueError, match="stream='console' must be 'stderr', 'stdout'"):
        ProgressBarLogger("console")
