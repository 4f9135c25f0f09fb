"""Which lines wait for the device, on the simulated accelerator and by the warnings of CUDA."""

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.callbacks import SyncMonitor
from composer.core import Callback, Evaluator
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer_dist.testing import SimulatedAccelerator


class Reads(Callback):
    """Read the loss a number of times in each batch, once every other batch, and in evaluations."""

    def __init__(self, times):
        self.times = times

    def after_loss(self, state, logger):
        for _ in range(self.times):
            state.loss.item()
        if self.times and state.timestamp.num_batches % 2:
            state.loss.tolist()

    def eval_batch_end(self, state, logger):
        state.outputs.sum().item()


def train(monitor, times, num_fits=1):
    if torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator type per process: CUDA")
    kept, network = InMemoryLogger(), nn.Linear(3, 2)
    batches = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range(8)]
    with (
        SimulatedAccelerator() as accelerator,
        Trainer(
            model=ComposerClassifier(network, num_classes=2),
            train_dataloader=[tuple(part.pin_memory() for part in batch) for batch in batches],
            eval_dataloader=Evaluator(label="eval", dataloader=batches[:2], device_eval_microbatch_size=4),
            eval_interval="2ba",
            optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
            max_duration="1ep",
            device_train_microbatch_size=4,
            callbacks=[Reads(times), monitor],
            loggers=kept,
            progress_bar=False,
            device=accelerator,
        ) as trainer,
    ):
        for _ in range(num_fits):
            trainer.fit(duration="1ep", reset_time=True)
    return [value for _, value in kept.data["synchronizations/per_batch"]]


@pytest.mark.parametrize("num_fits", [1, 2])
def test_lines_that_wait_are_named_and_counted_per_batch(num_fits, caplog):
    caplog.set_level(logging.INFO)
    monitor = SyncMonitor(skip_batches=2)
    assert train(monitor, times=2, num_fits=num_fits) == [2, 3, 2, 3, 2, 3] * num_fits
    assert monitor.num_batches == 6
    (twice, often), (half, seldom) = monitor.lines.most_common()
    assert (often, seldom) == (12, 3)
    assert __file__ in twice
    assert __file__ in half
    first, second, last = [each.message for each in caplog.records if "waited" in each.message][:3]
    assert first.endswith(f"Batch 2 waited for the device at:\n    {twice} (2 times)")
    assert second.endswith(f"Batch 3 waited for the device at:\n    {half}")
    assert last.endswith(f" 2.5 times per batch, in 6 batches:\n    2 at {twice}\n    0.5 at {half}")


def test_a_run_that_never_waits_is_reported_as_such(caplog):
    caplog.set_level(logging.INFO)
    assert train(SyncMonitor(), times=0) == [0] * 6
    (record,) = [each for each in caplog.records if "waited" in each.message]
    assert (record.levelname, "0 times per batch" in record.message) == ("INFO", True)


@pytest.fixture
def modes(monkeypatch):
    """Replace the debug mode of CUDA by one that only records its changes."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def waits():
    warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


def test_warnings_of_cuda_are_counted_and_others_passed_on(modes):
    state = SimpleNamespace(
        device=SimpleNamespace(torch_device=torch.device("cuda")), timestamp=SimpleNamespace(num_batches=1)
    )
    monitor, logged = SyncMonitor(skip_batches=0), []
    logger = SimpleNamespace(log_metrics=logged.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        monitor.fit_start(state, logger)
        monitor.batch_start(state, logger)
        assert modes[-1] == "warn"
        for _ in range(3):  # the same line again, which the filter would show once
            waits()
        warnings.warn("another", stacklevel=1)
        monitor.batch_end(state, logger)
        monitor.fit_end(state, logger)
        waits()
    assert modes[-1] == "default"
    assert logged == [{"synchronizations/per_batch": 3}]
    ((place, count),) = monitor.lines.items()
    assert (place.endswith(" waits"), __file__ in place, count) == (True, True, 3)
    assert [str(each.message)[:8] for each in caught] == ["another", "called a"]


def test_a_device_whose_waits_are_unknown_is_named(modes):
    state = SimpleNamespace(device=SimpleNamespace(torch_device=torch.device("cpu")))
    with pytest.warns(UserWarning, match="only works on CUDA devices, but training runs on cpu"):
        SyncMonitor().init(state, None)
