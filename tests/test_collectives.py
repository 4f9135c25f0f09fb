"""How many collectives a step of two ranks has, beyond those of the same loop by hand, and from which lines."""

import collections
import copy
import io
import sys
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from composer import Callback, Trainer
from composer.algorithms import GradientClipping
from composer.models import ComposerClassifier
from composer.trainer import _report
from composer_dist import dist
from composer_dist.testing import run_ranks

NUM_STEPS, BATCH = 8, 4
COUNTED = range(4, 7)  # in the first steps the ranks compare what they have, and DDP rebuilds its buckets
OWN = ("site-packages/torch", "/composer_dist/")  # whose callers are the lines to name


class Collectives(TorchDispatchMode):
    """Records each collective with the step and the line that called it."""

    def __init__(self):
        super().__init__()
        self.step = 0
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            stack = traceback.extract_stack(sys._getframe(1))
            line = next(frame for frame in reversed(stack) if not any(part in frame.filename for part in OWN))
            self.seen.append((self.step, func._opname, f"{Path(line.filename).name}:{line.lineno} in {line.name}"))
        return func(*args, **(kwargs or {}))

    def per_step(self):
        """Return how often each collective was called in a step, by name and line."""
        counts = collections.Counter((name, line) for step, name, line in self.seen if step in COUNTED)
        return {key: count / len(COUNTED) for key, count in counts.items()}


class Samples(TensorDataset):
    """Counts the batches that are read."""

    def __init__(self, collectives):
        generator = torch.Generator().manual_seed(0)
        targets = torch.arange(2 * BATCH * NUM_STEPS) % 3
        super().__init__(torch.randn(len(targets), 8, generator=generator), targets)
        self.collectives = collectives

    def __getitems__(self, indices):
        self.collectives.step += 1
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """The samples of a rank, whose number no sampler knows."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        for number in range(len(self.samples) // 2):
            self.samples.collectives.step += number % BATCH == 0
            yield self.samples[number]


class Listener(Callback):
    """Reads nothing, but could stop the training."""

    def batch_end(self, state, logger):
        pass


def collate(samples):
    return torch.utils.data.default_collate(samples)


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def make_loader(collectives, kind):
    samples = Samples(collectives)
    if kind == "stream":
        return DataLoader(Stream(samples), batch_size=BATCH)
    own = {"collate_fn": collate} if kind == "collate" else {}
    return DataLoader(samples, batch_size=BATCH, sampler=dist.get_sampler(samples), **own)


def count_by_hand(is_sharded):
    network = make_network()
    network = fully_shard(network) if is_sharded else DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with Collectives() as collectives:
        for inputs, targets in make_loader(collectives, "sampler"):
            optimizer.zero_grad()
            cross_entropy(network(inputs), targets).backward()
            optimizer.step()
    return collectives.per_step()


def count(loader, has_metrics, has_callback, arguments):
    network = make_network()
    metrics = [MulticlassAccuracy(3, average="micro"), MulticlassF1Score(3)] if has_metrics else []
    model = ComposerClassifier(network, num_classes=3, train_metrics=MetricCollection(metrics))
    with Collectives() as collectives:
        trainer = Trainer(
            model=model,
            train_dataloader=make_loader(collectives, loader),
            max_duration="1ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=[Listener()] if has_callback else [],
            console_stream=io.StringIO(),
            device="cpu",
            seed=1,
            **arguments,
        )
        with trainer:
            trainer.fit()
    assert len(trainer.state.train_metric_values) == len(metrics)
    return collectives.per_step()


# Each way to train, with how many collectives a step may have beside those of the loop by hand.
ROWS = {
    "plain": (0, "sampler", False, False, {"progress_bar": False}),
    "4 microbatches": (0, "sampler", False, False, {"progress_bar": False, "device_train_microbatch_size": 1}),
    "progress bar": (1, "sampler", False, False, {}),
    "progress bar, 2 metrics": (1, "sampler", True, False, {}),
    "progress bar, 2 metrics, a callback": (2, "sampler", True, True, {}),
    "gradient clipping": (1, "sampler", True, False, {"algorithms": [GradientClipping("norm", 1.0)]}),
    "own collate_fn": (3, "collate", True, True, {}),
    "iterable dataset": (4, "stream", True, True, {}),
    "FSDP2, progress bar, 2 metrics": (1, "sampler", True, False, {"parallelism_config": {"fsdp": {}}}),
}


# With a progress bar alone, ranks exchange the results of some batches, here of 1, 3 and 7.
BETWEEN_EXCHANGES = {name: row for name, row in ROWS.items() if row[0] == 1}


def count_all():
    by_hand = {is_sharded: sum(count_by_hand(is_sharded).values()) for is_sharded in (False, True)}
    found = {}
    for max_delay_s, rows in ((0, ROWS), (1e9, BETWEEN_EXCHANGES)):
        _report._MAX_DELAY_S = max_delay_s
        for name, (budget, *row, arguments) in rows.items():
            found[name, 0 if max_delay_s else budget] = count(*row, copy.deepcopy(arguments))
    return by_hand, found


def test_a_step_has_no_collectives_beside_those_of_its_budget(tmp_path):
    """A new one fails the test, which names its line."""
    for by_hand, found in run_ranks(count_all, store=tmp_path / "store", timeout_s=120):
        assert by_hand == {False: 1, True: 2}  # the all-reduce; the all-gather and the reduce-scatter
        for (name, budget), counts in found.items():
            arguments = ROWS[name][-1]
            more = sum(counts.values()) - by_hand["parallelism_config" in arguments]
            lines = "\n".join(f"{count:g} {collective} at {line}" for (collective, line), count in counts.items())
            assert more == budget, f"{name}: {more:g} collectives more than by hand, not {budget}. A step has\n{lines}"
