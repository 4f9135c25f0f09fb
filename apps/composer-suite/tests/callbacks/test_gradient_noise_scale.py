"""The gradient noise scale of samples whose gradients are known, from microbatches and from ranks."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from composer import Trainer
from composer.callbacks import GradientNoiseScale
from composer.core import State
from composer.loggers import InMemoryLogger, Logger
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks

WIDTH, SIGMA, SAMPLES = 4, 2.0, 4096
NAMES = [f"gradient_noise_scale/{name}" for name in ("samples", "trace", "squared_norm")]


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.ones(WIDTH // 2, dtype=torch.float64))

    def forward(self, batch):
        return self.theta - batch


class Quadratic(ComposerModel):
    """The gradient of the sample `x` is `theta - x`."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList([Half(), Half()])

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Half)

    def forward(self, batch):
        return torch.cat([half(part) for half, part in zip(self.halves, batch.chunk(2, dim=1), strict=True)], dim=1)

    def loss(self, outputs, batch):
        return outputs.square().sum(dim=1).mean() / 2


def samples(num=SAMPLES):
    return SIGMA * torch.randn(num, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def measure(num=SAMPLES, batch_size=32, microbatch=8, smoothing=0.998, **more):
    """Return the logged values of each batch; the weights stay as they are."""
    model, memory = Quadratic(), InMemoryLogger()
    data = samples(num)
    size = batch_size // dist.get_world_size()
    with Trainer(
        model,
        train_dataloader=DataLoader(data, size, sampler=dist.get_sampler(data, shuffle=False)),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        max_duration="1ep",
        device_train_microbatch_size=microbatch,
        callbacks=[GradientNoiseScale(1, smoothing)],
        loggers=memory,
        device="cpu",
        progress_bar=False,
        seed=1,
        **more,
    ) as trainer:
        trainer.fit()
    return torch.tensor([[float(value) for _, value in memory.data[name]] for name in NAMES], dtype=torch.float64)


def by_formula(data, part_size, batch_size=32, num_parts=None):
    """Return the trace and the squared norm of each batch, of the differences of norms as the paper has them."""
    found = []
    for batch in data.split(batch_size):
        gradients = 1 - batch
        big = gradients.mean(dim=0).square().sum()
        small = gradients.unflatten(0, (-1, part_size)).mean(dim=1)[:num_parts].square().sum(dim=1).mean()
        squared_norm = (batch_size * big - part_size * small) / (batch_size - part_size)
        found.append([(small - big) / (1 / part_size - 1 / batch_size), squared_norm])
    return torch.tensor(found).T


@pytest.mark.parametrize("microbatch", [1, 8, 16])
def test_each_batch_is_as_the_formula_of_the_paper_says(microbatch):
    scale, *parts = measure(64, microbatch=microbatch, smoothing=0.0)
    expected = by_formula(samples(64), microbatch)
    torch.testing.assert_close(torch.stack(parts), expected)
    torch.testing.assert_close(scale, expected[0] / expected[1])


@pytest.mark.parametrize("microbatch", [8, 12, 20])
def test_it_tends_to_the_noise_scale_of_a_normal_distribution(microbatch):
    assert_normal(measure(microbatch=microbatch))


def assert_normal(values):
    trace, squared_norm = WIDTH * SIGMA**2, WIDTH
    assert values[1, -1] == pytest.approx(trace, rel=0.1)
    assert values[2, -1] == pytest.approx(squared_norm, rel=0.15)
    assert values[0, -1] == pytest.approx(trace / squared_norm, rel=0.2)


def on_two_ranks():
    sharded = {"parallelism_config": {"fsdp": {}}}
    with pytest.raises(ValueError, match=r"at most half of the batch of a rank\."):
        measure(64, microbatch=16, **sharded)
    state = State(Quadratic(), rank_zero_seed=0, auto_microbatching=True)
    with pytest.raises(ValueError, match="needs a fixed size of microbatches on several ranks"):
        GradientNoiseScale().fit_start(state, Logger(state))
    return {
        "DDP": measure(64, microbatch=16, smoothing=0.0),
        "DDP, microbatches": measure(64, microbatch=8, smoothing=0.0),
        "FSDP2, microbatches": measure(64, microbatch=4, smoothing=0.0, **sharded),
        "FSDP2, unequal microbatches": measure(microbatch=12, **sharded),
    }


def test_two_ranks_are_two_parts_and_shards_are_measured_by_microbatches(tmp_path):
    first, second = run_ranks(on_two_ranks, store=tmp_path / "store", timeout_s=120)
    for name, values in first.items():
        assert torch.equal(values, second[name]), f"{name}: the ranks' values differ"
    data = samples(64)
    of_ranks = data.view(2, 16, 2, WIDTH).transpose(1, 2).reshape(64, WIDTH)  # every rank has every second sample
    torch.testing.assert_close(first["DDP"][1:], by_formula(of_ranks, 16))
    torch.testing.assert_close(first["DDP, microbatches"][1:], by_formula(of_ranks, 8))
    torch.testing.assert_close(first["FSDP2, microbatches"][1:], by_formula(data, 8, num_parts=1))
    assert_normal(first["FSDP2, unequal microbatches"])


def test_a_resumed_callback_continues_its_means():
    callback = GradientNoiseScale()
    callback._means = torch.tensor([1.0, 2.0, 0.5])
    again = GradientNoiseScale()
    again.load_state_dict(callback.state_dict())
    assert again.state_dict() == callback.state_dict() == {"means": [1.0, 2.0, 0.5]}


def test_a_batch_of_one_part_is_refused():
    with pytest.raises(ValueError, match=r"this batch has one part.* or train on several ranks"):
        measure(64, microbatch=32)


@pytest.mark.parametrize("arguments", [{"interval": 0}, {"smoothing": 1.0}, {"smoothing": True}])
def test_arguments_out_of_range_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}="):
        GradientNoiseScale(**arguments)
