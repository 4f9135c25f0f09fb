"""What the progress bar shows on a stream that is not a terminal."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import tqdm.auto

from composer.algorithms import LabelSmoothing
from composer.core import Callback
from composer.loggers import ProgressBarLogger
from composer.optim import CosineAnnealingScheduler
from composer.report import RunRecorder


@pytest.fixture
def shown(make_trainer, make_loader):
    """Train with a progress bar on a stream, and return the text."""

    def show(**settings):
        stream = io.StringIO()
        trainer = make_trainer(progress_bar=True, console_stream=stream, **settings)
        trainer.fit()
        trainer.close()
        return stream.getvalue()

    return show


def test_each_epoch_ends_in_a_line_that_names_its_loss(shown):
    text = shown(max_duration="2ep")
    assert re.search(r"^train epoch 1/2, loss=0\.\d+, Accuracy=[\d.]+: 2/2 \[", text, re.MULTILINE)
    assert re.search(r"^train epoch 2/2, loss=0\.\d+, Accuracy=[\d.]+: 2/2 \[", text, re.MULTILINE)
    assert "\r" not in text


def test_a_duration_in_batches_has_one_bar(shown):
    text = shown(max_duration="3ba")
    assert len(re.findall(r"^train, loss=.*: 3/3", text, re.MULTILINE)) == 1
    assert "train epoch" not in text


@pytest.mark.parametrize(
    ("interval", "positions"),
    [("2ba", ["2/5", "4/5", "1/5", "3/5", "5/5"]), ("2ep", ["5/5"])],  # batches of the whole training
)
def test_lines_are_written_at_the_interval(shown, make_loader, interval, positions):
    text = shown(max_duration="2ep", train_dataloader=make_loader(20, 4), console_log_interval=interval)
    assert re.findall(r"^train epoch ./2.*: (\d/5) ", text, re.MULTILINE) == positions


def test_the_line_of_a_batch_has_the_loss_of_this_batch(shown):
    class NumbersLosses(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"loss/train/total": float(state.timestamp.batch)})

    text = shown(max_duration="8ba", console_log_interval="2ba", callbacks=NumbersLosses())
    assert re.findall(r"loss=(\d).*: (\d)/8", text) == [(number, number) for number in "2468"]


def test_an_evaluation_ends_in_a_line_with_its_metrics_and_the_best_so_far(shown, make_loader):
    class Overrides(Callback):
        def eval_end(self, state, logger):
            epoch = int(state.timestamp.epoch)
            logger.log_metrics({"metrics/eval/CrossEntropy": 3.0 - epoch, "metrics/eval/MulticlassAccuracy": 1 / epoch})

    text = shown(max_duration="3ep", eval_dataloader=make_loader(6, 2), callbacks=Overrides())
    assert [line for line in text.splitlines() if line.startswith("eval at")] == [
        "eval at epoch 1: CrossEntropy 2, MulticlassAccuracy 1",
        "eval at epoch 2: CrossEntropy 1 (best), MulticlassAccuracy 0.5 (best 1 at epoch 1)",
        "eval at epoch 3: CrossEntropy 0 (best), MulticlassAccuracy 0.3333 (best 1 at epoch 1)",
    ]


def test_the_best_so_far_includes_the_evaluations_before_a_resume(shown, make_loader, tmp_path):
    class Worsens(Callback):
        def eval_end(self, state, logger):
            logger.log_metrics({"metrics/eval/CrossEntropy": float(state.timestamp.epoch)})

    settings = {"save_folder": str(tmp_path), "run_name": "plum", "autoresume": True, "callbacks": Worsens()}
    shown(max_duration="1ep", eval_dataloader=make_loader(6, 2), **settings)
    text = shown(max_duration="2ep", eval_dataloader=make_loader(6, 2), **settings)
    assert f"Resumed from {tmp_path}/ep1-ba2-rank0.pt at epoch 1, batch 2\n" in text
    assert "eval at epoch 2: CrossEntropy 2 (best 1 at epoch 1)" in text


def test_a_bar_given_as_logger_is_not_doubled(make_trainer):
    with pytest.warns(UserWarning, match="already holds a ProgressBarLogger"):
        trainer = make_trainer(progress_bar=True, loggers=ProgressBarLogger(io.StringIO()))
    assert sum(isinstance(callback, ProgressBarLogger) for callback in trainer.state.callbacks) == 1


def test_the_run_is_described_before_the_first_bar(make_loader, make_model, shown, tmp_path):
    model = make_model()
    model.module[0].requires_grad_(False)
    text = shown(
        model=model,
        max_duration="2ep",
        eval_dataloader=make_loader(6, 2),
        schedulers=CosineAnnealingScheduler(),
        algorithms=LabelSmoothing(0.1),
        save_folder=str(tmp_path),
        save_interval="1ba",
        run_name="plum",
    )
    environment, model, data, first = text.splitlines()[:4]
    assert re.fullmatch(r"Composer \S+, PyTorch \S+ \| cpu, fp32 \| 1 rank \| run plum, seed 3", environment)
    assert model == (
        "ComposerClassifier(Sequential): 22 parameters, 10 trainable | SGD, lr 0.1 | CosineAnnealingScheduler | "
        "LabelSmoothing"
    )
    assert data == f"2 batches of 4 per epoch, 2ep | evaluation: eval every 1ep | checkpoints every 1ba in {tmp_path}"
    assert first.startswith("train epoch 1/2")


def test_the_end_names_the_results_and_the_last_checkpoint_and_the_run_page(make_loader, shown, tmp_path):
    recorder = RunRecorder(f"{tmp_path}/runs/{{run_name}}", page=False)
    text = shown(
        max_duration="2ep",
        eval_dataloader=make_loader(6, 2),
        save_folder=f"{tmp_path}/saved",
        run_name="plum",
        loggers=recorder,
    )
    ended, saved, page = text.splitlines()[-3:]
    assert re.fullmatch(
        r"Finished at epoch 2, batch 4, in [\d.]+ s: loss [\d.]+, eval/CrossEntropy [\d.]+, "
        r"eval/MulticlassAccuracy [\d.]+",
        ended,
    )
    assert saved == f"Last checkpoint: {tmp_path}/saved/ep2-ba4-rank0.pt"
    assert page == f"Run page: composer report {tmp_path}/runs/plum"


def test_a_last_batch_with_more_samples_than_are_left_ends_a_full_bar(shown):
    assert re.search(r"^train, loss=.*: 6/6 \[", shown(max_duration="6sp"), re.MULTILINE)  # of batches of 4


def test_without_a_length_no_number_of_batches_is_named(shown, make_loader):
    class Unsized(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(make_loader(8, 4).dataset)

    text = shown(max_duration="1ep", train_dataloader=torch.utils.data.DataLoader(Unsized(), batch_size=4))
    assert "\nbatches of 4, 1ep\n" in text


def test_an_evaluation_without_training_has_no_interval_and_no_epoch(make_trainer, make_loader):
    stream = io.StringIO()
    trainer = make_trainer(
        progress_bar=True, console_stream=stream, max_duration=None, eval_dataloader=make_loader(6, 2)
    )
    trainer.eval()
    *_, data, results = stream.getvalue().splitlines()
    assert data == "evaluation: eval"
    assert results.startswith("eval at batch 0: CrossEntropy")


def test_an_early_end_names_its_reason(shown):
    class Stops(Callback):
        stop_reason = None

        def batch_end(self, state, logger):
            self.stop_reason = "enough"
            state.stop_training()

    last = shown(max_duration="2ep", callbacks=Stops()).splitlines()[-1]
    assert re.match(r"Stopped early at epoch 1, batch 1, in .* s: enough: loss", last)


def test_training_that_goes_on_in_the_middle_of_an_epoch_counts_from_there(make_trainer):
    stream = io.StringIO()
    trainer = make_trainer(progress_bar=True, console_stream=stream, max_duration="1ep")
    trainer.fit(duration="1ba")
    trainer.fit(duration="1ba")
    assert re.findall(r": (\d/\d) ", stream.getvalue()) == ["1/1", "2/2"]


def test_the_bar_moves_once_for_each_batch(make_trainer, make_loader, monkeypatch):
    moves = []

    class Counted(tqdm.auto.tqdm):
        def update(self, n=1):
            moves.append((re.match(r"\w+", self.bar_format)[0], n))
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
    assert "|{bar}|" in made[0]["bar_format"]  # where the widget puts itself


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
