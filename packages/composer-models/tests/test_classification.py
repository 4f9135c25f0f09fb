import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from composer_models import ComposerClassifier, CrossEntropy


@pytest.fixture
def batch():
    return 4 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2])


class Sized(nn.Identity):
    num_classes = 3


def test_loss_is_the_cross_entropy_of_the_logits(batch):
    model = ComposerClassifier(nn.Identity(), num_classes=3)
    torch.testing.assert_close(model.loss(model(batch), batch), F.cross_entropy(*batch))


def test_default_metrics_are_accuracy_and_for_evaluation_cross_entropy(batch):
    model = ComposerClassifier(nn.Identity(), num_classes=3)
    assert list(model.get_metrics(is_train=True)) == ["MulticlassAccuracy"]
    metrics = model.get_metrics(is_train=False)
    assert list(metrics) == ["CrossEntropy", "MulticlassAccuracy"]
    for metric in metrics.values():
        model.update_metric(batch, model.eval_forward(batch), metric)
    assert metrics["MulticlassAccuracy"].compute() == 0.75
    torch.testing.assert_close(metrics["CrossEntropy"].compute(), F.cross_entropy(*batch))


def test_accuracy_counts_examples_and_not_classes():
    model = ComposerClassifier(nn.Identity(), num_classes=2)
    (metric,) = model.get_metrics(is_train=True).values()
    # always class 0: right for three of four examples, for one of two classes
    model.update_metric((None, torch.tensor([0, 0, 0, 1])), torch.tensor([[1.0, 0.0]]).expand(4, 2), metric)
    assert metric.compute() == 0.75


def test_the_modules_number_of_classes_wins_with_a_warning():
    with pytest.warns(UserWarning, match="num_classes=5 differs from Sized.num_classes=3"):
        assert ComposerClassifier(Sized(), num_classes=5).num_classes == 3


def test_the_modules_number_of_classes_is_enough():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ComposerClassifier(Sized()).num_classes == 3


@pytest.mark.parametrize("given", ["train_metrics", "val_metrics"])
def test_missing_metrics_need_the_number_of_classes(given):
    with pytest.raises(ValueError, match="num_classes=None"):
        ComposerClassifier(nn.Identity(), **{given: MulticlassAccuracy(num_classes=3)})


def test_metrics_of_the_callers_need_no_number_of_classes():
    train, val = MulticlassAccuracy(num_classes=3), MetricCollection({"f1": MulticlassF1Score(num_classes=3)})
    model = ComposerClassifier(nn.Identity(), train_metrics=train, val_metrics=val)
    assert model.num_classes is None
    assert model.get_metrics(is_train=True) == {"MulticlassAccuracy": train}
    assert model.get_metrics(is_train=False) == {"f1": val["f1"]}


def test_a_module_serves_as_loss_function(batch):
    model = ComposerClassifier(nn.Identity(), num_classes=3, loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1))
    torch.testing.assert_close(model.loss(batch[0], batch), F.cross_entropy(*batch, label_smoothing=0.1))


def test_further_arguments_reach_the_loss_function(batch):
    model = ComposerClassifier(nn.Identity(), num_classes=3)
    assert model.loss(batch[0], batch, reduction="none").shape == (4,)


def test_the_state_dict_holds_the_module_and_nothing_else():
    model = ComposerClassifier(nn.Linear(2, 3), num_classes=3)
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


def test_a_classifier_compiles_to_torchscript(batch):
    model = ComposerClassifier(nn.Linear(3, 3), num_classes=3, val_metrics=CrossEntropy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and torchmetrics announce the end of TorchScript
        scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(batch), model(batch))


def test_a_dict_batch_points_to_the_keys_of_from_module():
    model = ComposerClassifier(nn.Identity(), num_classes=3)
    with pytest.raises(TypeError, match=r"the keys 'image', 'label'.*input_key='image', target_key='label'"):
        model({"image": torch.eye(3), "label": torch.arange(3)})
