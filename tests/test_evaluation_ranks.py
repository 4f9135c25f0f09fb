"""An evaluation counts every sample once, however unevenly the samples fall on the ranks.

Of the sizes below some leave a rank without any sample of its own. Every second dataset has labels that are ignored.
"""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from torchmetrics.retrieval import RetrievalMAP

from composer import Callback, Evaluator, Trainer
from composer.algorithms import EMA
from composer.metrics import CrossEntropy, LossMetric
from composer.models import ComposerClassifier
from composer_dist import dist
from composer_dist.testing import run_ranks

BATCH = 3
SIZES = range(2 * BATCH * 3 + 2)  # from nothing to two full batches on each of three ranks and one sample more


def make_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 3)


def make_dataset(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 4, generator=generator)
    targets = torch.randint(3, (size,), generator=generator)
    ignored = (torch.arange(size) % 5 % 3 == 1) & (size % 2 == 1)
    return TensorDataset(inputs, targets.masked_fill(ignored, -100))


class RankOfFirstClass(RetrievalMAP):
    """Keeps lists that ranks gather element by element, where those of AUROC are joined first."""

    def update(self, outputs, targets):
        super().update(outputs[:, 0], targets == 0, indexes=torch.zeros_like(targets))


def make_metrics() -> MetricCollection:
    return MetricCollection(
        [
            CrossEntropy(),
            LossMetric(nn.functional.cross_entropy),
            MulticlassAccuracy(3, average="micro", ignore_index=-100),
            MulticlassAUROC(3, ignore_index=-100),
            RankOfFirstClass(),
        ],
        compute_groups=False,
    )


def ignore_too_few_samples():
    """Ignore what torchmetrics says of sets without a class."""
    for message in ("No (positive|negative) samples", ".*for one or more classes was `nan`"):
        warnings.filterwarnings("ignore", message)


class Count(Callback):
    """Notes how many samples an evaluation has counted, batch by batch."""

    def __init__(self):
        self.samples = []

    def eval_batch_end(self, state, logger):
        self.samples.append(int(state.eval_timestamp.sample))


def evaluate_all(microbatch_size) -> dict[int, tuple[dict[str, float], list[int]]]:
    results = {}
    for size in SIZES:
        dataset, count = make_dataset(size), Count()
        loader = DataLoader(dataset, batch_size=BATCH, sampler=dist.get_sampler(dataset))
        evaluator = Evaluator(label="eval", dataloader=loader, device_eval_microbatch_size=microbatch_size)
        model = ComposerClassifier(make_network(), num_classes=3, val_metrics=make_metrics())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Trainer(
            model=model, optimizers=optimizer, callbacks=count, device="cpu", progress_bar=False, seed=1
        ) as trainer:
            with warnings.catch_warnings():
                ignore_too_few_samples()
                warnings.filterwarnings("ignore", "No batches were evaluated" if size == 0 else "^$")
                trainer.eval(evaluator)
            values = {name: float(value) for name, value in trainer.state.eval_metric_values.items()}
            results[size] = (values, count.samples)
    return results


def evaluate_cut_and_uncut() -> dict[int, dict[int, tuple[dict[str, float], list[int]]]]:
    return {microbatch_size: evaluate_all(microbatch_size) for microbatch_size in (1, BATCH)}


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda world_size: f"{world_size} ranks")
def evaluated(request, tmp_path_factory):
    store = tmp_path_factory.mktemp("shards") / "store"
    return run_ranks(evaluate_cut_and_uncut, store=store, world_size=request.param, timeout_s=300)


@pytest.mark.parametrize("microbatch_size", [BATCH, 1])
def test_metrics_are_those_of_the_whole_dataset(evaluated, microbatch_size):
    """A loss was the mean of its batches' means, and AUROC took down a run with a rank that had no sample."""
    network = make_network()
    for size in SIZES:
        inputs, targets = make_dataset(size).tensors
        outputs, expected = network(inputs).detach(), {}
        if size:
            metrics = make_metrics()
            with warnings.catch_warnings():
                ignore_too_few_samples()
                metrics.update(outputs, targets)
                expected = {name: float(value) for name, value in metrics.compute().items()}
            expected["CrossEntropy"] = expected["LossMetric"] = float(nn.functional.cross_entropy(outputs, targets))
        for values, samples in (results[microbatch_size][size] for results in evaluated):
            # A mean of at most 20 float32 values of size 1, summed in parts.
            assert values == pytest.approx(expected, rel=20 * torch.finfo(torch.float32).eps, abs=1e-6, nan_ok=True)
            assert samples == sorted(samples)
            assert (samples[-1] if samples else 0) == size


def evaluate_streams(lengths) -> list[int]:
    """Evaluate a stream of so many batches on each rank, and return what was counted."""
    count = Count()
    batch = (torch.randn(BATCH, 4), torch.zeros(BATCH, dtype=torch.long))
    model = ComposerClassifier(make_network(), num_classes=3)
    with Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=count,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.eval(
            Evaluator(
                label="eval",
                dataloader=[batch] * lengths[dist.get_global_rank()],
                device_eval_microbatch_size=BATCH,
            )
        )
    return count.samples


def test_the_shortest_of_unequal_streams_ends_the_evaluation_of_all(tmp_path):
    assert run_ranks(evaluate_streams, [2, 3], store=tmp_path / "store", world_size=2) == [[6, 12], [6, 12]]


def evaluate_statistics(algorithms, folder) -> dict[str, float]:
    """Return what an evaluation says at the end of training with a checkpoint, or of the last checkpoint."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.9), nn.Linear(6, 3))
    dataset = make_dataset(16)
    loader = DataLoader(dataset, batch_size=2, sampler=dist.get_sampler(dataset))
    is_trained = dist.get_world_size() > 1
    with Trainer(
        model=ComposerClassifier(network, num_classes=3),
        train_dataloader=loader,
        eval_dataloader=loader,
        eval_interval="1ep",
        max_duration="1ep",
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
        algorithms=[make() for make in algorithms],
        load_path=None if is_trained else f"{folder}/latest-rank0.pt",
        save_folder=folder if is_trained else None,
        device="cpu",
        progress_bar=False,
        seed=1,
    ) as trainer:
        if is_trained:
            trainer.fit()
        else:
            trainer.eval()
        return {name: float(value) for name, value in trainer.state.eval_metric_values.items()}


@pytest.mark.parametrize("algorithms", [[], [partial(EMA, half_life="2ba")]])
def test_the_ranks_of_ddp_evaluate_what_their_checkpoint_has(tmp_path, algorithms):
    folder = str(tmp_path / "checkpoints")
    on_two, other = run_ranks(evaluate_statistics, algorithms, folder, store=tmp_path / "store", timeout_s=120)
    assert on_two == other
    alone = evaluate_statistics(algorithms, folder)
    assert on_two["MulticlassAccuracy"] == alone["MulticlassAccuracy"]
    # The mean of 16 losses near 1, added up in another order and grouping.
    assert on_two["CrossEntropy"] == pytest.approx(alone["CrossEntropy"], abs=16 * torch.finfo(torch.float32).eps)
