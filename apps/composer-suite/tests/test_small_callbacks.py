"""Callbacks that log a number or look at one."""

import datetime
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.callbacks import FreeOutputs, LRMonitor, MemoryMonitor, NaNMonitor, RuntimeEstimator
from composer.callbacks.memory_monitor import reduce_value
from composer.core import Callback, State, Timestamp
from composer.loggers import InMemoryLogger, Logger, LoggerDestination
from composer.models import ComposerModel
from composer_dist.testing import SimulatedAccelerator


class Model(ComposerModel):
    def __init__(self, losses=None):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.losses = losses

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        return loss if self.losses is None else self.losses(loss)


class Kept(LoggerDestination):
    def __init__(self):
        self.metrics = []
        self.hyperparameters = {}

    def log_metrics(self, metrics, step=None):
        self.metrics.append(dict(metrics))

    def log_hyperparameters(self, hyperparameters):
        self.hyperparameters.update(hyperparameters)

    def of(self, name):
        return [metrics[name] for metrics in self.metrics if name in metrics]


def train(callbacks, model=None, batches=6, **arguments):
    model = model or Model()
    kept = Kept()
    data = TensorDataset(torch.randn(batches, 2), torch.zeros(batches, dtype=torch.long))
    arguments.setdefault("optimizers", torch.optim.SGD(model.parameters(), lr=0.5))
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=1),
        max_duration="1ep",
        callbacks=callbacks,
        loggers=kept,
        progress_bar=False,
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return kept


@pytest.fixture
def make_state():
    return lambda **settings: State(model=Model(), rank_zero_seed=0, run_name="run", device="cpu", **settings)


def test_the_learning_rate_of_each_group_is_logged_for_the_batch_that_trains_with_it():
    model = Model()
    optimizer = torch.optim.SGD([{"params": [model.layer.weight]}, {"params": [model.layer.bias], "lr": 0.1}], lr=0.5)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    kept = train(
        LRMonitor(), model, batches=3, optimizers=optimizer, schedulers=halving, step_schedulers_every_batch=True
    )
    assert kept.of("lr-SGD/group0") == [0.5, 0.25, 0.125]
    assert kept.of("lr-SGD/group1") == [0.1, 0.05, 0.025]


@pytest.mark.parametrize("rate", [1, 0.5, torch.tensor(0.5)], ids=["whole", "fraction", "tensor"])
def test_a_learning_rate_that_is_read_later_is_what_it_was(rate):
    optimizer = SimpleNamespace(param_groups=[{"lr": rate}])
    state, kept = SimpleNamespace(timestamp=Timestamp(), optimizers=[optimizer]), InMemoryLogger()
    before = float(rate)
    LRMonitor().batch_start(state, Logger(state, kept))
    optimizer.param_groups[0]["lr"] *= 0.25  # of a tensor, in place
    assert [float(value) for _, value in kept.data["lr-SimpleNamespace/group0"]] == [before]


def test_outputs_are_gone_before_the_backward_pass():
    class Sizes(Callback):
        def __init__(self):
            self.sizes = []

        def before_backward(self, state, logger):
            self.sizes.append(state.outputs.numel())

    sizes = Sizes()
    train([FreeOutputs(), sizes], batches=2)
    assert sizes.sizes == [0, 0]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (lambda loss: loss * math.nan, "Train loss contains a NaN"),
        (lambda loss: [loss, loss * math.nan], "Train loss contains a NaN"),
        (lambda loss: {"total": loss, "aux": loss * math.nan}, "Train loss aux contains a NaN"),
    ],
)
def test_a_loss_that_is_no_number_is_found_at_its_microbatch(losses, said):
    with pytest.raises(RuntimeError, match=said):
        train(NaNMonitor(), Model(losses))


@pytest.mark.parametrize("bad", [None, 0, 3])
def test_losses_on_an_accelerator_are_read_once_per_batch(bad):
    """Each of four microbatches waited for the device."""

    class Losses:
        num_calls = 0

        def __call__(self, loss):
            is_bad = self.num_calls == bad
            self.num_calls += 1
            return {"total": loss, "aux": loss * math.nan if is_bad else loss * 0}

    if torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator type per process: CUDA")
    with SimulatedAccelerator() as accelerator, accelerator.counting() as counts:
        model = Model(Losses())
        start = model.layer.weight.detach().clone()
        with (
            nullcontext() if bad is None else pytest.raises(RuntimeError, match=r"Train loss aux .* a NaN.*batch 0"),
            Trainer(
                model=model,
                train_dataloader=[(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))] * 2,
                optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
                max_duration="1ep",
                callbacks=NaNMonitor(),
                device_train_microbatch_size=1,
                progress_bar=False,
                device=accelerator,
                on_divergence=None,
            ) as trainer,
        ):
            trainer.fit()
        assert model.layer.weight.cpu().equal(start) == (bad is not None), "the optimizer has stepped"
    reads = [count for place, count in counts.synchronizations.items() if "_single_event" in place]
    assert sum(reads) == (1 if bad is not None else 2)


def test_infinite_losses_of_both_signs_are_no_nan(make_state):
    state = make_state()
    state.loss = [torch.tensor([math.inf, -math.inf]), torch.tensor(1.0)]
    NaNMonitor().after_loss(state, None)


@pytest.mark.parametrize("loss", [{"a": [1.0]}, [1.0], 1.0])
def test_a_loss_of_another_kind_is_refused(make_state, loss):
    state = make_state()
    state.loss = loss
    with pytest.raises(TypeError, match="must be a tensor, or a sequence or dict of them"):
        NaNMonitor().after_loss(state, None)


def test_losses_that_are_numbers_pass():
    train(NaNMonitor(), Model(lambda loss: {"total": loss, "aux": loss}))


def test_the_remaining_time_is_estimated_from_the_first_batch_not_skipped():
    estimator = RuntimeEstimator(skip_batches=2, time_unit="seconds")
    kept = train(estimator, batches=6)
    estimates = kept.of("time/remaining_estimate")
    assert len(estimates) == 4
    assert all(estimate >= 0 for estimate in estimates)
    assert estimates[-1] == 0  # nothing remains
    assert kept.hyperparameters["time/remaining_estimate_unit"] == "seconds"


def test_evaluations_that_are_still_to_come_count(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    state = State(model=Model(), rank_zero_seed=0, run_name="run", device="cpu", max_duration="10ba")
    kept, estimator = Kept(), RuntimeEstimator(skip_batches=0, time_unit="seconds")
    logger = Logger(state, kept)
    estimator.batch_start(state, logger)

    state.timestamp = state.timestamp.to_next_batch()
    clock[0] += 2.0  # one batch
    state.set_dataloader([], "eval")
    state.eval_timestamp = state.eval_timestamp.to_next_batch(duration=datetime.timedelta(seconds=3))
    clock[0] += 3.0  # one evaluation
    estimator.eval_end(state, logger)
    estimator.batch_end(state, logger)
    assert kept.of("time/remaining_estimate") == [pytest.approx(9 * 2.0 + 9 * 3.0)]


def test_of_several_evaluations_the_first_one_does_not_count_as_typical(monkeypatch, make_state):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    state = make_state(max_duration="10ba")
    kept, estimator = Kept(), RuntimeEstimator(skip_batches=0, time_unit="seconds")
    logger = Logger(state, kept)
    state.set_dataloader([], "eval")
    estimator.batch_start(state, logger)
    for evaluation_s in (9, 2, 4):
        state.timestamp = state.timestamp.to_next_batch()
        clock[0] += 1.0  # one batch
        state.eval_timestamp = Timestamp().to_next_batch(duration=datetime.timedelta(seconds=evaluation_s))
        clock[0] += evaluation_s
        estimator.eval_end(state, logger)
    estimator.batch_end(state, logger)
    # Seven batches of one second remain, and as many evaluations of (2 + 4) / 2 seconds.
    assert kept.of("time/remaining_estimate") == [pytest.approx(7 * 1.0 + 7 * 3.0)]


def test_the_estimate_of_a_second_training_knows_nothing_of_the_first(monkeypatch, make_state):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    state = make_state(max_duration="4ba")
    kept, estimator = Kept(), RuntimeEstimator(skip_batches=0, time_unit="seconds")
    logger = Logger(state, kept)
    for max_duration, batch_s in (("4ba", 1.0), ("8ba", 3.0)):
        state.max_duration = max_duration
        estimator.fit_start(state, logger)
        estimator.batch_start(state, logger)
        for _ in range(4):
            state.timestamp = state.timestamp.to_next_batch()
            clock[0] += batch_s
            estimator.batch_end(state, logger)
        clock[0] += 1000.0  # nobody trains
    assert kept.of("time/remaining_estimate") == pytest.approx([3.0, 2.0, 1.0, 0.0, 9.0, 6.0, 3.0, 0.0])


def test_where_no_accelerator_is_the_memory_monitor_says_so():
    with pytest.warns(UserWarning, match="only works on CUDA devices, but the model is on cpu"):
        kept = train(MemoryMonitor(), batches=1)
    assert not any(name.startswith("memory/") for metrics in kept.metrics for name in metrics)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_allocated_memory_is_logged_in_gigabytes():
    from composer.devices import DeviceGPU

    held = torch.zeros(250_000_000, device="cuda")  # 1 GB
    state = State(model=Model().cuda(), rank_zero_seed=0, run_name="run", device=DeviceGPU())
    kept = Kept()
    MemoryMonitor(dist_aggregate_batch_interval=1).after_train_batch(state, Logger(state, kept))
    assert kept.of("memory/current_allocated_mem")[0] >= held.nbytes / 1e9
    assert kept.of("memory/current_allocated_mem_max") == kept.of("memory/current_allocated_mem")


def test_memory_of_all_ranks_is_reduced_without_a_wait():
    if torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator type per process: CUDA")
    with SimulatedAccelerator() as accelerator:
        held = torch.zeros(250_000, device="simgpu")
        state, kept = State(model=Model(), rank_zero_seed=0, run_name="run", device=accelerator), Kept()
        with accelerator.counting() as counts:
            MemoryMonitor(dist_aggregate_batch_interval=1).after_train_batch(state, Logger(state, kept))
        assert not counts.synchronizations
        for ending in ("avg", "min", "max"):
            (value,) = kept.of(f"memory/current_allocated_mem_{ending}")
            assert value.item() == kept.of("memory/current_allocated_mem")[0] >= held.nbytes / 1e9


def test_a_reduction_by_another_name_is_refused():
    with pytest.raises(ValueError, match="op='median' must be one of 'mean'"):
        reduce_value(1.0, torch.device("cpu"), "median")


def test_a_unit_of_time_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="time_unit='weeks' must be one of"):
        RuntimeEstimator(time_unit="weeks")
