"""Metrics of training over several ranks have the values that torchmetrics computes by itself, to the last bit."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.utils import dist
from composer_dist.testing import run_ranks

NUM_RANKS, NUM_BATCHES = 3, 4


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
    "farthest": Farthest(),
    # These gather their states themselves: a list, a metric inside of another one, and one of this rank alone.
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
    logged = {name: [value for _, value in log.data[f"metrics/train/{name}"]] for name in ("sum", "mean", "max", "min")}
    return compare.expected, logged, compare.alone


def test_metrics_over_ranks_are_those_of_torchmetrics(tmp_path):
    results = run_ranks(train, store=tmp_path / "store", world_size=NUM_RANKS, timeout_s=60)
    for expected, logged, alone in results:
        for name, values in logged.items():
            assert values[:NUM_BATCHES] == [of_batch[name] for of_batch in expected]
        assert alone in ([], [of_batch["sum"] for of_batch in expected])
