"""Metrics of training over several ranks have the values that torchmetrics computes by itself, to the last bit."""

import copy
import io
import re
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.trainer import _report
from composer.utils import dist
from composer_dist import RankDisagreementError
from composer_dist.testing import run_ranks

NUM_RANKS, NUM_BATCHES = 3, 4
NUMBERS = ("sum", "mean", "max", "min", "reach", "growing", "shaped")


class Farthest(Metric):
    """States of several dtypes and shapes, with reductions of all kinds; one is not reduced at all."""

    def __init__(self):
        super().__init__()
        self.add_state("flag", torch.tensor(False), dist_reduce_fx=lambda flags: flags.any(dim=0))
        self.add_state("half", torch.zeros(3, dtype=torch.bfloat16), dist_reduce_fx="mean")
        self.add_state("none", torch.zeros(2, 2, dtype=torch.float64), dist_reduce_fx=None)
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, values):
        self.flag |= (values > 2).any()
        self.half += values[:3].bfloat16()
        self.none = self.none + values[:4].double().view(2, 2)
        self.count += 2**60 // 3  # float64 cannot represent it

    def compute(self):
        return torch.cat([self.none.flatten(), self.half.double(), self.flag[None], (self.count % 1000)[None]])


class Reach(Metric):
    """Keeps what is not a state: numbers, a list, a tensor and a buffer, replaced or changed in place."""

    def __init__(self):
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.register_buffer("in_place", torch.zeros(()))
        self.scale, self.seen, self.highest = 0.0, {"list": []}, torch.zeros(())

    def update(self, values):
        self.count += 1
        self.scale = float(values[0])
        self.seen["list"].append(values.max())
        self.highest.add_(values.max())
        self.in_place.add_(1)

    def compute(self):
        return self.scale + torch.stack(self.seen["list"]).sum() + self.highest + self.in_place * self.count


class Growing(Metric):
    """Has a state of the values so far, of which there may be more on one rank than on another."""

    def __init__(self, is_even):
        super().__init__()
        self.num = 2 if is_even else 1 + dist.get_global_rank()
        self.add_state("seen", torch.zeros(0), dist_reduce_fx="cat")

    def update(self, values):
        self.seen = torch.cat([self.seen, values.expand(max(2, values.numel()))[: self.num]])

    def compute(self):
        return self.seen.sum()


class Shaped(Metric):
    """Has a state of the shape of the values from the first update on."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, values):
        self.total = self.total + values.double()

    def compute(self):
        return self.total.sum()


class Within(Metric):
    """Computes another metric, which has the states."""

    def __init__(self):
        super().__init__()
        self.inner = SumMetric()

    def update(self, values):
        self.inner.update(values)

    def compute(self):
        return self.inner.compute()


METRICS = {
    "sum": SumMetric(),
    "mean": MeanMetric(),
    "max": MaxMetric(),
    "min": MinMetric(),
    "reach": Reach(),
    "farthest": Farthest(),
    # These gather their states themselves: with shapes of their own, a list, a metric inside of another one, and one of
    # this rank alone.
    "growing": Growing(is_even=True),
    "shaped": Shaped(),
    "cat": CatMetric(),
    "within": Within(),
    "own": SumMetric(sync_on_compute=False),
    "F1": MulticlassF1Score(3),
    "confusion": MulticlassConfusionMatrix(3),
}


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train=False):
        return dict(METRICS)

    def update_metric(self, batch, outputs, metric):
        if isinstance(metric, (MulticlassF1Score, MulticlassConfusionMatrix)):
            metric.update(outputs, batch[1])
        else:
            metric.update(batch[0].flatten())


class Compare(Callback):
    """Compares the values of each batch with those of copies of the metrics, which torchmetrics synchronizes."""

    def __init__(self):
        self.expected = []
        self.alone = []

    def batch_end(self, state, logger):
        copies = copy.deepcopy(state.train_metrics)
        self.expected.append({name: metric.compute() for name, metric in copies.items()})
        if dist.get_global_rank() == 1:  # a read by one rank must not wait for the others
            self.alone.append(state.train_metrics["sum"].compute())
            torch.testing.assert_close(dict(state.train_metric_values), self.expected[-1], rtol=0, atol=0)


def train():
    torch.manual_seed(0)
    inputs = torch.randn(2 * NUM_RANKS * NUM_BATCHES, 6)
    data = TensorDataset(inputs, torch.arange(len(inputs)) % 3)
    model, log, compare = Model(), InMemoryLogger(), Compare()
    loader = DataLoader(data, batch_size=2, sampler=dist.get_sampler(data))
    with Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=compare,
        loggers=log,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    logged = {name: [value for _, value in log.data[f"metrics/train/{name}"]] for name in NUMBERS}
    return compare.expected, logged, compare.alone, show_with_and_without_a_reader(loader)


def show(loader, callbacks, duration):
    """Return the results at the end, what the progress bar wrote, and the number of exchanges."""
    torch.manual_seed(1)
    model, console, exchanges = Model(), io.StringIO(), []
    start = _report.SharedResults
    _report.SharedResults = lambda *arguments: exchanges.append(1) or start(*arguments)
    with Trainer(
        model=model,
        train_dataloader=loader,
        max_duration=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=callbacks,
        device="cpu",
        console_stream=console,
    ) as trainer:
        trainer.fit()
        results = {**trainer.state.total_loss_dict, **trainer.state.train_metric_values}
    _report.SharedResults = start
    lines = [re.sub(r"\[.*?\]| in .*", "", line) for line in console.getvalue().splitlines() if "loss" in line]
    return {name: value.tolist() for name, value in results.items()}, lines, len(exchanges)


def show_with_and_without_a_reader(loader):
    """Train with a listener, which may read the results of each batch, and with the progress bar alone."""
    _report._MAX_DELAY_S = 1e9  # or the intervals would depend on how fast batches are
    return [
        [show(loader, callbacks, duration) for callbacks in (Callback(), [])]
        for duration in ("2ep", f"{NUM_BATCHES + 2}ba")
    ]


def test_metrics_over_ranks_are_those_of_torchmetrics(tmp_path):
    results = run_ranks(train, store=tmp_path / "store", world_size=NUM_RANKS, timeout_s=60)
    for expected, logged, alone, shown in results:
        for name, values in logged.items():
            assert values[:NUM_BATCHES] == [of_batch[name] for of_batch in expected]
        assert alone in ([], [of_batch["sum"] for of_batch in expected])
        # Only for the bar, the ranks exchange those of the batches 1, 3, 4 (which ends the epoch), 6 and 8.
        for (read, unread), num_batches, num_exchanges in zip(shown, (8, 6), (5, 4), strict=True):
            assert read[:2] == unread[:2]
            assert (read[2], unread[2]) == (num_batches, num_exchanges)


class UpdatesLater(Callback):
    """Updates and resets a metric after the loop has started to exchange its states."""

    def __init__(self):
        self.values = []

    def batch_end(self, state, logger):
        metric = state.train_metrics["sum"]
        if dist.get_global_rank() == 0:
            self.values.append(float(metric.compute()))  # does not wait for the other rank
        metric.update(torch.tensor(1000.0))
        self.values.append(float(metric.compute()))
        metric.reset()
        metric.update(torch.tensor(7.0))
        self.values.append(float(metric.compute()))


class Widening(SumMetric):
    """Has a state in float64 from the third update on, on rank 1."""

    num_updates = 0

    def update(self, value):
        super().update(value)
        self.num_updates += 1
        if self.num_updates >= 3 and dist.get_global_rank() == 1:
            self.sum_value = self.sum_value.double()


class Small(Model):
    """Updates its metrics with 1."""

    def __init__(self, metrics):
        super().__init__()
        self.metrics = metrics

    def get_metrics(self, is_train=False):
        return self.metrics

    def update_metric(self, batch, outputs, metric):
        metric.update(torch.tensor(1.0))


class OnceOnly(Small):
    """Updates the metric `first` in its first batch alone."""

    is_first = True

    def update_metric(self, batch, outputs, metric):
        if isinstance(metric, Counted):
            metric.update(torch.tensor(1.0))
        elif self.is_first:
            metric.update(torch.tensor(3.0))
            self.is_first = False


class Counted(SumMetric):
    """Counts how often any copy of it is computed."""

    computed: ClassVar = []

    def compute(self):
        self.computed.append(self)
        return super().compute()


def train_unread(model):
    """Train without anybody who reads the metrics of a batch."""
    data = TensorDataset(torch.zeros(8, 6), torch.zeros(8, dtype=torch.long))
    Counted.computed.clear()
    loader = DataLoader(data, batch_size=1, sampler=dist.get_sampler(data))
    settings = {"optimizers": torch.optim.SGD(model.parameters(), lr=0.1), "callbacks": Callback()}
    with Trainer(
        model=model, train_dataloader=loader, max_duration="1ep", device="cpu", progress_bar=False, **settings
    ) as trainer:
        trainer.fit()
        values = {name: float(value) for name, value in trainer.state.train_metric_values.items()}
    return values, len(Counted.computed)


def train_small(callbacks, metrics, num_batches):
    data = TensorDataset(torch.zeros(2 * num_batches, 6), torch.zeros(2 * num_batches, dtype=torch.long))
    model, log = Small(metrics), InMemoryLogger()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=1, sampler=dist.get_sampler(data)),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=callbacks,
        loggers=log,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return {
        name: [(int(now.batch), float(value)) for now, value in log.data[f"metrics/train/{name}"]] for name in metrics
    }


def go_through_changes():
    later = UpdatesLater()
    logged = train_small(later, {"sum": SumMetric()}, 2)
    with pytest.warns(UserWarning, match="the metric 'other' of training has changed its shape or dtype"):
        changed = train_small([], {"sum": SumMetric(), "other": Widening()}, 3)
    with pytest.raises(RuntimeError, match="equal size"):  # torchmetrics cannot concatenate them
        train_small([], {"growing": Growing(is_even=False)}, 1)
    with pytest.raises(RankDisagreementError, match="metric rank 0") as error:
        train_small([], {"sum": SumMetric(), f"rank {dist.get_global_rank()}": SumMetric()}, 1)
    once = train_unread(OnceOnly({"every": Counted(), "first": SumMetric()}))
    every = train_unread(Small({"every": Counted(), "first": SumMetric()}))
    return later.values, logged, changed, str(error.value), (once, every)


def test_metrics_that_change_have_the_values_of_the_change(tmp_path):
    first, second = run_ranks(go_through_changes, store=tmp_path / "store", timeout_s=60)
    assert first[0] == 2 * [2.0, 2002.0, 14.0]
    assert second[0] == 2 * [2002.0, 14.0]
    for _, logged, changed, _, unread in (first, second):
        assert logged == {"sum": [(0, 2.0), (1, 2.0), (2, 2.0)]}
        assert changed["sum"] == [(0, 2.0), (1, 2.0), (2, 2.0), (3, 2.0)]
        assert changed["other"] == [(0, 2.0), (1, 2.0)]
        # The values of a batch are dropped only if the next one has a value of every metric.
        assert unread == (({"every": 2.0, "first": 6.0}, 4), ({"every": 2.0, "first": 2.0}, 1))
    assert "metric rank 1" in first[3]
    assert "metric rank 1" in second[3]
