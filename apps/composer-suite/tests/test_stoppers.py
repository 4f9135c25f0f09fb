"""EarlyStopper and ThresholdStopper on metrics whose values are known beforehand."""

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from composer import Trainer
from composer.callbacks import EarlyStopper, ThresholdStopper
from composer.core import Callback, Evaluator, State
from composer.models import ComposerModel
from composer_dist.testing import SimulatedAccelerator

BATCHES = 3  # in an epoch


class Scripted(Metric):
    """A metric that takes the next of given values each time it is computed anew."""

    def __init__(self, values):
        super().__init__()
        self.values = values
        self.seen = 0

    def update(self, *_):
        pass

    def reset(self):
        super().reset()
        self.seen += 1

    def compute(self):
        return torch.tensor(self.values[min(self.seen, len(self.values)) - 1])


class Model(ComposerModel):
    def __init__(self, **metrics):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.metrics = metrics

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train=False):
        return {} if is_train else self.metrics

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


class BatchesSeen(Callback):
    def __init__(self, seen):
        self.seen = seen

    def batch_start(self, state, logger):
        self.seen.append(int(state.timestamp.batch))


def epochs_trained(stopper, values, name="Quality", max_duration="20ep"):
    """Train with one evaluation after each epoch, whose metric has the given values one after the other."""
    data = DataLoader(TensorDataset(torch.randn(BATCHES, 2), torch.zeros(BATCHES, dtype=torch.long)), batch_size=1)
    model = Model(**{name: Scripted(values)})
    with Trainer(
        model=model,
        train_dataloader=data,
        eval_dataloader=Evaluator(label="held-out", dataloader=data, metric_names=[name]),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        max_duration=max_duration,
        callbacks=stopper,
        progress_bar=False,
        device="cpu",
    ) as trainer:
        trainer.fit()
        return trainer.state.timestamp


@pytest.mark.parametrize("patience", [1, 3])
def test_training_stops_when_patience_is_used_up_after_the_last_improvement(patience):
    values = [0.1, 0.5, 0.7, 0.6, 0.7, 0.5, 0.6, 0.6, 0.6]
    stopper = EarlyStopper("Quality", "held-out", patience=patience)
    # The best is seen at the end of epoch 3; the evaluation of an epoch follows the tick of its clock.
    assert epochs_trained(stopper, values).epoch == 3 + patience + 1


@pytest.mark.parametrize(
    "make",
    [lambda: EarlyStopper("Quality", "train"), lambda: ThresholdStopper("Quality", "train", 9.0)],
    ids=["early", "threshold"],
)
def test_a_metric_on_an_accelerator_is_read_once(make):
    """Each comparison waited for the device."""

    class OnDevice(Scripted):
        def compute(self):
            return super().compute().to("simgpu", non_blocking=True)

    if torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator type per process: CUDA")
    with SimulatedAccelerator() as accelerator:
        metric, stopper = OnDevice([0.5, 0.75, 0.6]), make()
        state = State(Model(), rank_zero_seed=0, run_name="run", device=accelerator)
        state.set_dataloader([0], "train")
        state.train_metrics = {"Quality": metric}
        stopper.fit_start(state, None)
        for _ in range(3):
            metric.reset()
            metric.update()
            with accelerator.counting() as counts:
                stopper.epoch_end(state, None)
            assert counts.synchronizations.total() == 1


def test_an_improvement_below_the_least_difference_is_none():
    values = [0.5, 0.55, 0.60, 0.65]
    assert epochs_trained(EarlyStopper("Quality", "held-out", min_delta=0.2), values).epoch == 3


def test_a_first_value_that_is_no_number_is_no_best():
    values = [math.nan, math.nan, 0.1, 0.2, 0.3, 0.4]
    assert epochs_trained(EarlyStopper("Quality", "held-out", patience=3), values, max_duration="6ep").epoch == 6


def test_patience_begins_anew_where_training_does():
    stopper = EarlyStopper("Quality", "held-out", patience=1)
    stopper.load_state_dict({"best": 0.9, "best_occurred": "30ep"})
    assert epochs_trained(stopper, [0.1, 0.2, 0.1, 0.1, 0.1]).epoch == 4


def test_of_a_loss_less_is_better():
    falling = [5.0, 4.0, 3.0, 2.0, 1.0]
    assert epochs_trained(EarlyStopper("Loss", "held-out"), falling, name="Loss", max_duration="5ep").epoch == 5
    assert epochs_trained(EarlyStopper("Loss", "held-out", "gt"), falling, name="Loss", max_duration="5ep").epoch == 3


@pytest.mark.parametrize(
    ("name", "is_higher", "values"),
    [
        ("CrossEntropy", None, [5.0, 4.0, 3.0, 2.0, 1.0]),  # by its name
        ("MulticlassAccuracy", None, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("Accuracy", False, [5.0, 4.0, 3.0, 2.0, 1.0]),  # by the metric, whatever its name
        ("Loss", True, [0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_a_run_that_improves_goes_on(monkeypatch, name, is_higher, values):
    """A run whose cross entropy fell was stopped as if it had got worse, or at once as good enough."""
    monkeypatch.setattr(Scripted, "higher_is_better", is_higher)
    assert epochs_trained(EarlyStopper(name, "held-out"), values, name, max_duration="5ep").epoch == 5
    assert epochs_trained(EarlyStopper(name, "held-out"), values[::-1], name, max_duration="5ep").epoch == 3
    assert epochs_trained(ThresholdStopper(name, "held-out", values[3]), values, name, max_duration="6ep").epoch == 5


@pytest.mark.parametrize("stopper", [EarlyStopper, lambda *names: ThresholdStopper(*names, 1.0)])
def test_where_nothing_says_which_values_are_better_a_stopper_warns(stopper):
    with pytest.warns(UserWarning, match="Neither the metric 'Foo' of 'held-out' nor its name.*comp='greater' or"):
        assert epochs_trained(stopper("Foo", "held-out"), [0.1], "Foo", max_duration="1ep").epoch == 1


@pytest.mark.parametrize("stopper", [EarlyStopper, lambda *names, comp: ThresholdStopper(*names, 9.0, comp=comp)])
def test_a_stated_comparison_is_taken_as_it_is(stopper):
    assert epochs_trained(stopper("Foo", "held-out", comp="gt"), [0.1], "Foo", max_duration="1ep").epoch == 1


def test_a_stopper_goes_on_from_its_state():
    stopper = EarlyStopper("Quality", "held-out", patience=2)
    epochs_trained(stopper, [0.9, 0.1], max_duration="2ep")
    resumed = EarlyStopper("Quality", "held-out", patience=2)
    resumed.load_state_dict(stopper.state_dict())
    assert resumed.state_dict() == {"best": pytest.approx(0.9), "best_occurred": "1ep"}


def test_training_stops_once_the_threshold_is_passed_and_not_at_it():
    assert epochs_trained(ThresholdStopper("Quality", "held-out", 0.5), [0.1, 0.5, 0.6, 0.9]).epoch == 3


def test_a_metric_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"no metric 'Qualty'; its metrics are \['Quality'\]"):
        epochs_trained(ThresholdStopper("Qualty", "held-out", 0.5), [0.1])


@pytest.mark.parametrize("stopper", [EarlyStopper, lambda *names: ThresholdStopper(*names, 0.5)])
def test_a_stopper_looks_for_its_metric_before_anything_is_trained_on(stopper):
    seen = []
    watch = BatchesSeen(seen)
    with pytest.raises(ValueError, match="no metric 'Qualty'"):
        epochs_trained([stopper("Qualty", "held-out"), watch], [0.1])
    assert seen == []


@pytest.mark.parametrize("stopper", [EarlyStopper, lambda *names: ThresholdStopper(*names, 0.5)])
def test_a_label_that_no_dataloader_has_is_a_warning(stopper):
    with pytest.warns(
        UserWarning, match=r"dataloader_label='held-uot' does not name a dataloader.*'train', 'held-out'"
    ):
        assert epochs_trained(stopper("Quality", "held-uot"), [0.1], max_duration="1ep").epoch == 1


@pytest.mark.parametrize("stopper", [EarlyStopper, lambda *names, comp: ThresholdStopper(*names, 0.5, comp=comp)])
def test_a_comparison_by_another_name_is_refused(stopper):
    with pytest.raises(ValueError, match="comp='better' must be one of 'greater'"):
        stopper("Quality", "held-out", comp="better")


def test_patience_in_another_unit_is_refused():
    with pytest.raises(ValueError, match="patience='3sp' must be in epochs or batches"):
        EarlyStopper("Quality", "held-out", patience="3sp")
