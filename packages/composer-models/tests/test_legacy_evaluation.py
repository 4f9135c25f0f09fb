import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from composer_models import ComposerClassifier, ComposerModel


class Doubling(ComposerModel):
    """Predicts twice its input; the loss and the base are not under test."""

    def forward(self, batch):
        return 2 * batch[0]

    def loss(self, outputs, batch):
        return (outputs - batch[1]).abs().mean()


@pytest.fixture
def legacy_class():
    with pytest.warns(DeprecationWarning, match="Legacy defines"):

        class Legacy(Doubling):
            calls = 0

            def validate(self, batch):
                self.calls += 1
                return self(batch), batch[1]

            def metrics(self, train=False):
                return MeanSquaredError() if train else MetricCollection([MeanSquaredError()])

    return Legacy


@pytest.fixture
def batch():
    return torch.tensor([1.0, 2.0]), torch.tensor([2.0, 7.0])


def evaluate(model, batch):
    (metric,) = model.get_metrics(is_train=False).values()
    outputs = model.eval_forward(batch)
    model.update_metric(batch, outputs, metric)
    return metric.compute().item()


def test_validate_and_metrics_work_through_the_new_methods(legacy_class, batch):
    # outputs 2 and 4 against 2 and 7: errors 0 and 3
    assert evaluate(legacy_class(), batch) == 4.5


def test_validate_runs_once_for_all_metrics_of_a_batch(legacy_class, batch):
    model = legacy_class()
    outputs = model.eval_forward(batch)
    for _ in range(3):
        model.update_metric(batch, outputs, MeanSquaredError())
    assert model.calls == 1


@pytest.mark.parametrize("wrap", [tuple, list, dict])
def test_validate_runs_once_where_outputs_are_several_tensors(wrap, batch):
    with pytest.warns(DeprecationWarning, match="Several defines"):

        class Several(Doubling):
            calls = 0

            def validate(self, batch):
                self.calls += 1
                outputs = {"error": self(batch) - batch[1], "scale": 2}
                return wrap(outputs if wrap is dict else outputs.values()), batch[1]

    class Error(MeanSquaredError):
        def update(self, outputs, targets):
            super().update(outputs["error"] if wrap is dict else outputs[0], torch.zeros_like(targets))

    model, metric = Several(), Error()
    outputs = model.eval_forward(batch)
    for _ in range(2):
        model.update_metric(batch, outputs, metric)
    assert model.calls == 1
    assert metric.compute() == 4.5


def test_validate_may_return_what_has_no_weak_references(batch):
    with pytest.warns(DeprecationWarning, match="Plain defines"):

        class Plain(Doubling):
            def validate(self, batch):
                return 3.0, 1.0

    class Difference(MeanSquaredError):
        def update(self, outputs, targets):
            super().update(torch.tensor(outputs), torch.tensor(targets))

    model, metric = Plain(), Difference()
    model.update_metric(batch, model.eval_forward(batch), metric)
    assert metric.compute() == 4


def test_targets_of_one_batch_never_meet_outputs_of_another(legacy_class, batch):
    model, metric = legacy_class(), MeanSquaredError()
    model.eval_forward((torch.zeros(2), torch.zeros(2)))
    model.update_metric(batch, torch.tensor([2.0, 7.0]), metric)
    assert metric.compute() == 0


@pytest.mark.parametrize("is_train", [True, False])
def test_a_metric_or_a_collection_becomes_a_dict_by_class_name(legacy_class, is_train):
    assert list(legacy_class().get_metrics(is_train=is_train)) == ["MeanSquaredError"]


def test_the_warning_names_the_class_and_points_at_its_definition():
    with pytest.warns(DeprecationWarning, match=r"Old defines validate\(batch\) and metrics\(train\)") as caught:

        class Old(Doubling):
            def validate(self, batch): ...

            def metrics(self, train=False): ...

    assert [warning.filename for warning in caught] == [__file__]


def test_a_subclass_of_a_translated_class_does_not_warn_again(legacy_class, batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Child(legacy_class):
            def validate(self, batch):
                return batch[1], batch[1]

    assert evaluate(Child(), batch) == 0


def test_a_class_that_defines_both_protocols_speaks_the_new_one(batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Both(Doubling):
            def validate(self, batch):
                raise AssertionError

            def eval_forward(self, batch, outputs=None):
                return batch[1]

    assert Both().eval_forward(batch) is batch[1]


def test_helpers_that_only_share_the_names_are_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Modern(Doubling):
            metrics = None

            def validate(self): ...

    assert Modern.eval_forward is ComposerModel.eval_forward
    assert Modern.get_metrics is ComposerModel.get_metrics


def test_validate_of_a_classifiers_subclass_chooses_the_targets():
    with pytest.warns(DeprecationWarning, match="Flipped defines"):

        class Flipped(ComposerClassifier):
            def validate(self, batch):
                return self(batch), 1 - batch[1]

    model = Flipped(nn.Identity(), num_classes=2)
    metric = MulticlassAccuracy(num_classes=2, average="micro")
    batch = torch.eye(2), torch.tensor([0, 1])
    model.update_metric(batch, model.eval_forward(batch), metric)
    assert metric.compute() == 0


def test_no_tensor_of_a_batch_stays_in_the_model(legacy_class, batch):
    model = legacy_class()
    model.eval_forward(batch)
    assert set(vars(copy.deepcopy(model))) == {*vars(legacy_class()), "calls"}
    assert b"FloatStorage" not in pickle.dumps(vars(model))
