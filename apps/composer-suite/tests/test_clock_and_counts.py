"""What is counted while training: time, epochs for the sampler, tokens."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from composer.core import Callback
from composer.loggers import LoggerDestination
from composer.models import ComposerModel


def test_the_time_of_evaluation_is_no_time_of_training(make_trainer, make_loader):
    class Stopwatch(Callback):
        slept_s = 0.0

        def fit_start(self, state, logger):
            self.started_s = time.perf_counter()

        def eval_batch_start(self, state, logger):
            began_s = time.perf_counter()
            time.sleep(0.05)
            self.slept_s += time.perf_counter() - began_s

        def batch_end(self, state, logger):
            self.awake_s = time.perf_counter() - self.started_s - self.slept_s
            self.counted_s = state.timestamp.total_wct.total_seconds()

    stopwatch = Stopwatch()
    trainer = make_trainer(
        eval_dataloader=make_loader(2, 2), eval_interval="1ba", max_duration="2ba", callbacks=stopwatch
    )
    trainer.fit()
    # Both batches lie between FIT_START and the latest BATCH_END, as does the first sleep. So this holds however slow
    # the machine is. Timestamps round each of the two durations to a microsecond.
    assert 0 < stopwatch.counted_s <= stopwatch.awake_s + 2e-6


@pytest.mark.parametrize("by_batch", [False, True], ids=["sampler", "batch_sampler"])
def test_a_distributed_sampler_is_told_the_epoch(make_trainer, make_data, by_batch):
    data = make_data(8)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    order = {"batch_sampler": BatchSampler(sampler, 4, False)} if by_batch else {"sampler": sampler, "batch_size": 4}
    seen = []

    class Inputs(Callback):
        def batch_start(self, state, logger):
            seen.append(state.batch[0])

    trainer = make_trainer(
        train_dataloader=DataLoader(data, **order),
        device_train_microbatch_size=4,
        max_duration="2ep",
        callbacks=Inputs(),
    )
    trainer.fit()

    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1]
    assert torch.equal(torch.cat(seen), data.tensors[0][orders[0] + orders[1]])


def test_tokens_are_counted_and_logged(make_trainer):
    logged = []

    class Tokens(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            logged.extend(value for name, value in metrics.items() if name == "time/token")

    model = ComposerModel.from_module(
        nn.Embedding(7, 2),
        lambda outputs, labels: outputs.sum() * 0,
        input_key="input_ids",
        target_key="labels",
    )
    batch = {"input_ids": torch.ones(4, 3, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}
    trainer = make_trainer(
        model=model,
        train_dataloader=[batch, batch],
        device_train_microbatch_size=4,
        max_duration="2ba",
        loggers=Tokens(),
    )
    trainer.fit()
    assert trainer.state.timestamp.token == 2 * 4 * 3
    assert logged == [12, 24]  # before the second batch and at the end of fit
