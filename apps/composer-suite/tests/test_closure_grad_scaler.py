"""Loss scaling for optimizers that evaluate the loss themselves."""

import math

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from composer import Trainer
from composer.algorithms import SAM
from composer.models import ComposerModel
from composer.trainer._scaler import ClosureGradScaler, ShardedGradScaler
from composer_algorithms.sam import SAMOptimizer
from composer_dist import dist
from composer_dist.devices import Device
from composer_dist.testing import SimulatedAccelerator, run_ranks


class OnceOrTwice(torch.optim.SGD):
    """Calls its closure so often, and steps unless it returned None; keeps what it returned."""

    def __init__(self, parameters, calls=1):
        super().__init__(parameters, lr=1.0)
        self.calls = calls
        self.returned = []

    def step(self, closure):
        self.returned = [closure() for _ in range(self.calls)]
        if None not in self.returned:
            super().step()


def make_closure(scaler, weight, gradients):
    """A loss of which the gradient is the next one of a list."""
    following = iter(gradients)

    def closure():
        loss = (weight * next(following)).sum()
        scaler.scale(loss).backward()
        return loss.detach()

    return closure


def test_the_optimizer_sees_gradients_of_their_true_size():
    weight = nn.Parameter(torch.tensor([3.0]))
    scaler, optimizer = ClosureGradScaler("cpu", init_scale=8.0), OnceOrTwice([weight])

    scaler.step(optimizer, closure=make_closure(scaler, weight, [2.0]))
    scaler.update()

    assert weight.item() == 3.0 - 2.0
    assert optimizer.returned[0].item() == 6.0
    assert scaler.get_scale() == 8.0


def test_the_gradients_of_each_call_are_its_own():
    weight = nn.Parameter(torch.tensor([3.0]))
    scaler, optimizer = ClosureGradScaler("cpu", init_scale=8.0), OnceOrTwice([weight], calls=3)

    scaler.step(optimizer, closure=make_closure(scaler, weight, [2.0, 4.0, 0.5]))
    scaler.update()

    assert weight.item() == 2.5


@pytest.mark.parametrize("gradients", [[math.inf, 1.0], [1.0, math.nan]], ids=["first call", "second call"])
def test_an_overflow_skips_the_step_and_lowers_the_scale(gradients):
    weight = nn.Parameter(torch.tensor([3.0]))
    scaler, optimizer = ClosureGradScaler("cpu", init_scale=8.0), OnceOrTwice([weight], calls=2)

    scaler.step(optimizer, closure=make_closure(scaler, weight, gradients))

    assert weight.item() == 3.0
    assert optimizer.returned.count(None) == 1
    if gradients[1] != 1.0:  # an optimizer that goes on after None decides by its last call
        scaler.update()
        assert scaler.get_scale() == 4.0


def test_the_scale_grows_as_that_of_torch():
    weight = nn.Parameter(torch.tensor([3.0]))
    scaler = ClosureGradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = OnceOrTwice([weight])
    scales = []
    for _ in range(4):
        scaler.step(optimizer, closure=make_closure(scaler, weight, [1.0]))
        scaler.update()
        scales.append(scaler.get_scale())

    assert scales == [8.0, 16.0, 16.0, 32.0]


def test_an_optimizer_without_closure_steps_as_with_torchs_scaler():
    weight = nn.Parameter(torch.tensor([3.0]))
    scaler, optimizer = ClosureGradScaler("cpu", init_scale=8.0), torch.optim.SGD([weight], lr=1.0)

    scaler.scale((weight * 2.0).sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    assert weight.item() == 1.0


def test_a_disabled_scaler_lets_the_closure_through():
    weight = nn.Parameter(torch.tensor([3.0]))
    scaler, optimizer = ClosureGradScaler("cpu", enabled=False), OnceOrTwice([weight])

    scaler.step(optimizer, closure=make_closure(scaler, weight, [math.inf]))

    assert weight.item() == -math.inf


def step_with_an_overflow_on_rank_1(calls):
    weight = nn.Parameter(torch.tensor([3.0]))
    scaler, optimizer = ClosureGradScaler("cpu", init_scale=8.0), OnceOrTwice([weight], calls)
    overflow = math.inf if dist.get_global_rank() == 1 else 1.0
    results = []
    for gradient in (1.0, overflow, 1.0):
        scaler.step(optimizer, closure=make_closure(scaler, weight, [1.0] * (calls - 1) + [gradient]))
        scaler.update()
        results.append((weight.item(), None in optimizer.returned, scaler.get_scale()))
    return results


@pytest.mark.parametrize("calls", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path, calls):
    results = run_ranks(step_with_an_overflow_on_rank_1, calls, store=tmp_path / "store")

    assert results[0] == results[1] == [(2.0, False, 8.0), (2.0, True, 4.0), (1.0, False, 4.0)]


class Float16Device(Device):
    """A CPU that is none by its class, so that float16 is allowed."""

    name, dist_backend = "gpu", "gloo"
    _device = torch.device("cpu")

    def module_to_device(self, module):
        return module

    def tensor_to_device(self, tensor):
        return tensor


def train_with_sam(precision):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    model = ComposerModel.from_module(network, nn.functional.cross_entropy)
    data = [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1])) for _ in range(4)]
    with Trainer(
        model=model,
        train_dataloader=data,
        device_train_microbatch_size=2,
        max_duration="4ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=SAM(rho=0.1, interval=2),
        device=Float16Device(),
        precision=precision,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        assert isinstance(trainer.state.optimizers[0], SAMOptimizer)
        return trainer.state.scaler, [parameter.detach().clone() for parameter in network.parameters()]


def test_sam_trains_in_float16():
    scaler, weights = train_with_sam("amp_fp16")
    _, expected = train_with_sam("fp32")

    assert type(scaler) is ClosureGradScaler
    # On this device nothing but the scaling of the loss, by a power of 2, differs.
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaler", [None, GradScaler("cpu", enabled=False)], ids=["gone", "disabled"])
def test_float16_without_a_scaler_is_refused(scaler):
    model = ComposerModel.from_module(nn.Linear(2, 2), nn.functional.cross_entropy)
    with Trainer(
        model=model,
        train_dataloader=[(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))],
        device_train_microbatch_size=4,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device=Float16Device(),
        precision="amp_fp16",
        progress_bar=False,
    ) as trainer:
        trainer.state.scaler = scaler
        with pytest.raises(
            RuntimeError, match="Attempting to use grad scaling with precision='amp_fp16', but scaler is"
        ):
            trainer.fit(duration="1ba")


@pytest.mark.parametrize("gradient", [2.0, math.inf])
def test_offloaded_gradients_are_unscaled_with_the_values_of_the_device(gradient):
    """The scale was copied to the CPU without waiting, and read before it had arrived."""
    if torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator type per process: CUDA")
    with SimulatedAccelerator():
        on_host, on_device = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([3.0], device="simgpu"))
        scaler, optimizer = ShardedGradScaler("simgpu", init_scale=8.0), torch.optim.SGD([on_host, on_device], lr=1.0)
        scaler.scale((on_device * 2.0).sum()).backward()
        on_host.grad = torch.tensor([8.0 * gradient])
        scaler.step(optimizer)
        scaler.update()
        expected = [1.0, 1.0, 8.0] if gradient == 2.0 else [3.0, 3.0, 4.0]
        assert [on_host.item(), on_device.item(), scaler.get_scale()] == expected
