"""OptimizerMonitor against norms computed one by one, whole and sharded."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer.callbacks import OptimizerMonitor
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from composer.optim import DecoupledAdamW
from composer_dist.testing import run_ranks


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))

    def forward(self, batch):
        return self.net(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()


class Kept(LoggerDestination):
    def __init__(self):
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append({name: float(value) for name, value in metrics.items()})


def observed(model, optimizer, monitor, steps=1):
    """Train a few steps on the same batch and return what the monitor logged."""
    state = State(model=model, rank_zero_seed=0, run_name="run", device="cpu", optimizers=optimizer)
    kept = Kept()
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(model(torch.linspace(-1, 1, 24).reshape(4, 6)), None).backward()
        optimizer.step()
        state.timestamp = state.timestamp.to_next_batch()
        monitor.batch_end(state, Logger(state, kept))
    return kept.metrics


def make_model():
    torch.manual_seed(1)
    return Model()


def test_gradient_norms_are_those_of_each_parameter_and_of_all():
    model = make_model()
    (metrics,) = observed(model, torch.optim.SGD(model.parameters(), lr=0.0), OptimizerMonitor(batch_log_interval=1))
    expected = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    assert {f"l2_norm/grad/{name}" for name in expected} | {"l2_norm/grad/global"} == set(metrics)
    for name, norm in expected.items():
        assert metrics[f"l2_norm/grad/{name}"] == pytest.approx(norm, rel=1e-6)
    assert metrics["l2_norm/grad/global"] == pytest.approx(sum(n**2 for n in expected.values()) ** 0.5, rel=1e-6)


def test_what_the_optimizer_knows_is_logged_where_it_tells():
    model = make_model()
    optimizer = DecoupledAdamW(model.parameters(), lr=0.01)
    (metrics,) = observed(model, optimizer, OptimizerMonitor(batch_log_interval=1))
    assert len(metrics) == 4 * 4 + 1  # moment, param, update and grad of four parameters, and the whole gradient
    (metrics,) = observed(model, optimizer, OptimizerMonitor(False, batch_log_interval=1))
    assert len(metrics) == 4 + 1


def test_it_logs_every_so_many_batches():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert len(observed(model, optimizer, OptimizerMonitor(batch_log_interval=3), steps=7)) == 2


def _of_a_sharded_model(mesh_shape):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = make_model()
    fully_shard(model.net[0], mesh=mesh)
    fully_shard(model.net, mesh=mesh)
    return observed(model, DecoupledAdamW(model.parameters(), lr=0.01), OptimizerMonitor(batch_log_interval=1))[0]


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 1), (1, 2)], ids=["sharded", "replicated", "hybrid"])
def test_of_a_sharded_model_the_norms_are_the_whole_ones(mesh_shape, tmp_path):
    model = make_model()
    (whole,) = observed(model, DecoupledAdamW(model.parameters(), lr=0.01), OptimizerMonitor(batch_log_interval=1))
    for on_rank in run_ranks(_of_a_sharded_model, mesh_shape, store=tmp_path / "store"):
        assert on_rank == pytest.approx(whole, rel=1e-5)


def test_an_interval_of_no_batches_is_refused():
    with pytest.raises(ValueError, match="batch_log_interval=0 must be"):
        OptimizerMonitor(batch_log_interval=0)
