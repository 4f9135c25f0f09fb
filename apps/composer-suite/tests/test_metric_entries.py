"""Metrics with several numbers: MAP's dict, and a vector with one number for each class."""

import os

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from composer.callbacks import EarlyStopper, ThresholdStopper
from composer.loggers import ConsoleLogger, FileLogger, InMemoryLogger, ProgressBarLogger, TensorboardLogger
from composer.metrics import MAP
from composer.models import ComposerClassifier
from composer.report import RunRecorder, read_run

pytest.importorskip("pycocotools", reason="the wheel alone comes without the extra coco")
CLASSES = {"MulticlassAccuracy/0", "MulticlassAccuracy/1"}
BOX = torch.tensor([[0.0, 0.0, 10.0, 10.0]])


class Detector(ComposerClassifier):
    """Finds the box of an image of class 1, and half of the box of an image of class 0."""

    def update_metric(self, batch, outputs, metric):
        if not isinstance(metric, MAP):
            return metric.update(outputs, batch[1])
        labels = [label.reshape(1) for label in batch[1]]
        sizes = [torch.tensor([1.0, 1.0, 1.0, 1.0 if label else 0.6]) for label in labels]
        metric.update(
            [
                {"boxes": BOX * size, "scores": torch.ones(1), "labels": label}
                for size, label in zip(sizes, labels, strict=True)
            ],
            [{"boxes": BOX, "labels": label} for label in labels],
        )
        return None

    def get_metrics(self, is_train=False):
        return self.kept.setdefault(
            is_train, {"MAP": MAP(), "MulticlassAccuracy": MulticlassAccuracy(2, average=None, top_k=1)}
        )


@pytest.fixture
def train(make_trainer, make_loader):
    def run(**settings):
        torch.manual_seed(0)
        model = Detector(torch.nn.Linear(2, 2), num_classes=2)
        model.kept = {}
        trainer = make_trainer(model=model, eval_dataloader=make_loader(8, 4), max_duration="3ep", **settings)
        trainer.fit()
        trainer.close()
        return trainer

    return run


def test_each_logger_has_each_entry_under_its_own_name(train, tmp_path, capsys):
    """Seen before: a dict under `metrics/eval/MAP`, which TensorBoard and the run report left out."""
    pytest.importorskip("tensorboard", reason="the wheel alone comes without the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    memory = InMemoryLogger()
    train(
        loggers=[
            memory,
            FileLogger(filename=str(tmp_path / "log.txt")),
            TensorboardLogger(log_dir=str(tmp_path / "tb")),
            ConsoleLogger(log_interval="1ep"),
            ProgressBarLogger(),
            RunRecorder(str(tmp_path / "report")),
        ],
    )
    for label in ("train", "eval"):
        logged = {name.removeprefix(f"metrics/{label}/") for name in memory.data if name.startswith(f"metrics/{label}")}
        assert logged > {"MAP/map", "MAP/map_50", "MAP/mar_100"} | CLASSES
        assert not logged & {"MAP", "MulticlassAccuracy"}
    assert float(memory.data["metrics/eval/MAP/map_75"][-1][1]) == 0.5  # the half box of class 0 overlaps by 60 %
    assert float(memory.data["metrics/eval/MAP/map_50"][-1][1]) == 1.0
    names = {f"metrics/eval/{entry}" for entry in ("MAP/map_75", *CLASSES)}
    folder = next(path for path, _, files in os.walk(tmp_path / "tb") if files)
    drawn = EventAccumulator(folder)
    drawn.Reload()
    assert set(drawn.Tags()["scalars"]) >= names
    assert drawn.Scalars("metrics/eval/MAP/map_75")[-1].value == 0.5
    printed = capsys.readouterr()
    assert "metrics/eval/MAP/map_75: 0.5000" in (tmp_path / "log.txt").read_text()
    assert "metrics/eval/MAP/map_75: 0.5000" in printed.out + printed.err
    assert "MAP/map_75=0.5" in printed.err + printed.out
    assert names <= set(read_run(tmp_path / "report").curves)


@pytest.mark.parametrize("label", ["train", "eval"])
def test_a_stopper_watches_an_entry(train, label):
    """Seen before: "There is no metric 'MAP/map_50'. Did you mean 'MAP'?", and then "Could not infer dtype of dict"."""
    stopped = train(callbacks=ThresholdStopper("MAP/map_50", label, 0.99))
    assert stopped.state.timestamp.epoch == 1
    # The boxes are the same in each epoch, so the second has not got better, nor the third.
    early = EarlyStopper("MAP/map_75", label, patience=0)
    assert train(callbacks=early).state.timestamp.epoch == 2
    assert float(early.best) == 0.5
    assert train(callbacks=ThresholdStopper("MulticlassAccuracy/1", label, -1.0)).state.timestamp.epoch == 1


@pytest.mark.parametrize(
    ("settings", "choices"),
    [
        ({"callbacks": EarlyStopper("MulticlassAccuracy", "eval")}, CLASSES),
        ({"callbacks": ThresholdStopper("MulticlassAccuracy", "train", 0.9)}, CLASSES),
        ({"callbacks": EarlyStopper("MAP", "eval")}, {"MAP/map", "MAP/mar_10"}),
        (
            {"save_keep": {"best": ("metrics/eval/MulticlassAccuracy", "max", 1)}},
            {f"metrics/eval/{name}" for name in CLASSES},
        ),
        ({"save_keep": {"best": ("metrics/eval/MAP", None, 1)}}, {"metrics/eval/MAP/map_50"}),
    ],
)
def test_several_numbers_without_a_name_are_refused_before_the_first_batch(train, settings, choices, tmp_path):
    """Seen before, after a whole epoch: "Boolean value of Tensor with more than one value is ambiguous"."""
    if "save_keep" in settings:
        settings = {**settings, "save_folder": str(tmp_path)}
    with pytest.raises(ValueError, match="not one number") as caught:
        train(**settings)
    assert all(repr(choice) in str(caught.value) for choice in choices)
    assert "batch 0" in "".join(caught.value.__notes__)


def test_an_entry_that_does_not_exist_is_named_with_those_that_do(train):
    with pytest.raises(ValueError, match=r"'MAP/map50' is not one number; the metric 'MAP' has .*'MAP/map_50'"):
        train(callbacks=EarlyStopper("MAP/map50", "eval"))


@pytest.mark.parametrize(("entry", "best"), [("MAP/map_75", "ep1"), ("MulticlassAccuracy/1", None)])
def test_the_best_checkpoint_by_an_entry_stays(train, tmp_path, entry, best):
    """Seen before: the save failed with "float() argument must be ... not 'dict'"."""
    memory = InMemoryLogger()
    keep = {"last": 1, "best": (f"metrics/eval/{entry}", None, 1)}
    train(save_folder=str(tmp_path), save_keep=keep, loggers=memory)
    seen = [float(value) for _, value in memory.data[f"metrics/eval/{entry}"]]
    best = best or f"ep{seen.index(max(seen)) + 1}"
    assert {name.split("-")[0] for name in os.listdir(tmp_path)} == {best, "ep3", "latest"}


def test_a_matrix_stays_whole_and_stops_nothing(train, make_trainer, make_loader):
    """Seen before, after a whole epoch: "Boolean value of Tensor with more than one value is ambiguous"."""
    model = ComposerClassifier(
        torch.nn.Linear(2, 2), num_classes=2, val_metrics=MulticlassConfusionMatrix(2), train_metrics=None
    )
    stopper = EarlyStopper("MulticlassConfusionMatrix", "eval", comp="greater")
    trainer = make_trainer(model=model, eval_dataloader=make_loader(8, 4), max_duration="1ep", callbacks=stopper)
    with pytest.raises(ValueError, match=r"is Tensor of shape torch.Size\(\[2, 2\]\)"):
        trainer.fit()
