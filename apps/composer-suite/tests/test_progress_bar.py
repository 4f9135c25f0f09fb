"""What the progress bar shows on a stream."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import tqdm.auto

from composer.core import Callback
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


def test_the_settings_of_the_run_come_before_the_first_bar(shown):
    text = shown(max_duration="2ep")
    assert text.count("Config:\n") == 1
    assert text.index("rank_zero_seed: 3") < text.index("train ")


def test_training_that_goes_on_in_the_middle_of_an_epoch_has_a_bar_of_the_rest(make_trainer):
    stream = io.StringIO()
    trainer = make_trainer(progress_bar=True, console_stream=stream, max_duration="1ep")
    trainer.fit(duration="1ba")
    stream.truncate(0)
    trainer.fit(duration="1ba")
    trainer.close()
    first, *_, last = re.findall(r"(\d/2) ", stream.getvalue())
    assert (first, last) == ("1/2", "2/2")


def test_the_bar_moves_once_for_each_batch(make_trainer, make_loader, monkeypatch):
    moves = []

    class Counted(tqdm.auto.tqdm):
        def update(self, n=1):
            moves.append((self.bar_format.split()[0], n))
            return super().update(n)

    monkeypatch.setattr(tqdm.auto, "tqdm", Counted)
    trainer = make_trainer(
        max_duration="2ep", progress_bar=True, console_stream=io.StringIO(), eval_dataloader=make_loader(4, 2)
    )
    trainer.fit()
    assert moves == 2 * [("train", 1), ("train", 1), ("eval", 1), ("eval", 1)]


def test_in_a_notebook_the_bar_is_left_to_the_widget(make_trainer, monkeypatch):
    made = []

    class Kept(tqdm.auto.tqdm):
        def __init__(self, *arguments, **settings):
            made.append(settings)
            super().__init__(*arguments, **settings)

    monkeypatch.setattr(tqdm.auto, "tqdm", Kept)
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    make_trainer(max_duration="1ep", progress_bar=True, console_stream=io.StringIO()).fit()
    assert made[0]["ncols"] is None  # a widget takes the width of its cell
    assert made[0]["bar_format"].endswith("{l_bar}{bar}{r_bar}")  # where the widget puts itself


def test_an_unknown_stream_is_refused():
    with pytest.raises(ValueError, match="stream='console' must be 'stderr', 'stdout'"):
        ProgressBarLogger("console")


def test_a_value_that_no_bar_can_show_stops_nothing(make_trainer):
    class Logs(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"loss/train/complex": torch.tensor(1 + 2j), 7: 0.5})

    stream = io.StringIO()
    with make_trainer(progress_bar=True, console_stream=stream, max_duration="1ep", callbacks=Logs()) as trainer:
        trainer.fit()
    assert "2/2" in stream.getvalue()
    assert "complex" not in stream.getvalue()
