"""Optimizers of torch and of other packages in the Trainer: the table in `docs/guides/optimizers.md` is these runs.

All ranks read the same samples, so that the mean of their gradients is, to the last bit, that of one process.
"""

import importlib
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks

WIDTH, BATCHES = 64, 6  # 4,096 weights are the fewest that bitsandbytes keeps in 8 bits
REFUSED, SAME = "refused", "yes"


@dataclass(frozen=True)
class Row:
    """An optimizer, and what each way of training makes of it.

    Attributes:
        sharded: The outcome with FSDP2.
        tolerance: Of its weights, as a part of the distance that training moves them.
    """

    name: str
    settings: dict[str, Any]
    sharded: str = SAME
    tolerance: float = 0.0

    @property
    def label(self):
        return f"`{self.name}`"

    def make(self, parameters):
        module, _, name = self.name.rpartition(".")
        return getattr(importlib.import_module(module), name)(parameters, **self.settings)


# The norms of whole weights are added up in another order; products of matrices in bfloat16 round otherwise.
NORMS, BFLOAT16 = 1e-5, 0.1
ROWS = [
    Row("torch.optim.AdamW", {"lr": 0.01}),
    Row("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}),
    Row("torch.optim.Adafactor", {"lr": 0.01}, sharded=REFUSED),
    Row("torch.optim.Muon", {"lr": 0.02}, tolerance=BFLOAT16),
    Row("timm.optim.NAdamW", {"lr": 0.01}),
    Row("timm.optim.Lion", {"lr": 0.001}),
    Row("timm.optim.Lamb", {"lr": 0.01}, tolerance=NORMS),
    Row("timm.optim.Mars", {"lr": 0.01}, sharded=REFUSED),
    Row("schedulefree.AdamWScheduleFree", {"lr": 0.01}),
    Row("pytorch_optimizer.SOAP", {"lr": 0.01, "precondition_frequency": 2}, sharded=REFUSED),
    Row("pytorch_optimizer.Shampoo", {"lr": 0.01}, sharded=REFUSED),
    Row("bitsandbytes.optim.AdamW8bit", {"lr": 0.01}, sharded=REFUSED),
]
PRESENT = [row for row in ROWS if find_spec(row.name.partition(".")[0])]


def make_network():
    torch.manual_seed(1)
    layers = [nn.Linear(12, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4, bias=False))


def make_loader():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(4 * BATCHES, 12, generator=generator)
    data = TensorDataset(points, torch.randint(4, (4 * BATCHES,), generator=generator))
    return DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=False, num_replicas=1, rank=0))


def train(row, **settings):
    """Return the weights after training."""
    network = make_network()
    model = ComposerModel.from_module(network, F.cross_entropy)
    with Trainer(
        model=model,
        optimizers=row.make(model.parameters()),
        train_dataloader=make_loader(),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        seed=3,
        **settings,
    ) as trainer:
        trainer.fit()
        weights = trainer.strategy.model_state_dict(trainer.state.model)
        return {name.removeprefix("module."): value.clone() for name, value in weights.items()}


def train_by_hand(row):
    network = make_network()
    optimizer = row.make(network.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    for batch, (inputs, targets) in enumerate(make_loader()):
        if batch == BATCHES // 2 and hasattr(optimizer, "train"):
            optimizer.eval()  # as for the save below
            optimizer.train()
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return dict(network.state_dict())


def distance(weights, others):
    return max((weights[name] - others[name]).abs().max().item() for name in others)


def outcomes(row, folder, expected, **settings):
    """Return how far training ends from the expected weights, and training that was interrupted."""
    half = BATCHES // 2
    whole = train(row, save_folder=folder, save_interval=f"{half}ba", save_filename="ba{batch}.pt", **settings)
    resumed = train(row, load_path=str(Path(folder) / f"ba{half}.pt"), **settings)
    return distance(whole, expected), distance(resumed, expected)


def on_two_ranks(folder, expected):
    warnings.simplefilter("ignore")
    seen = {}
    for row in PRESENT:
        place = Path(folder) / row.name
        ddp = outcomes(row, str(place / "ddp"), expected[row.name])
        if row.sharded == REFUSED:
            with pytest.raises(ValueError, match=rf"^{row.name.rpartition('.')[2]} (keeps|cannot)") as refusal:
                train(row, parallelism_config={"fsdp": {}})
            fsdp = str(refusal.value)
        else:
            fsdp = outcomes(row, str(place / "fsdp"), expected[row.name], parallelism_config={"fsdp": {}})
        seen[row.name] = ddp, fsdp
    assert dist.get_world_size() == 2
    return seen


@pytest.mark.filterwarnings("ignore")  # of the optimizers' packages
def test_the_documented_table_is_what_the_optimizers_do(root, tmp_path):
    expected = {row.name: train_by_hand(row) for row in PRESENT}
    for row in PRESENT:
        assert outcomes(row, str(tmp_path / row.name), expected[row.name]) == (0.0, 0.0), row.name
    first, second = run_ranks(on_two_ranks, str(tmp_path / "ranks"), expected, store=tmp_path / "store", timeout_s=300)
    assert first == second
    begin = make_network().state_dict()
    for row in PRESENT:
        ddp, fsdp = first[row.name]
        assert ddp == (0.0, 0.0), row.name
        if row.sharded == SAME:
            assert max(fsdp) <= row.tolerance * distance(begin, expected[row.name]), (row.name, fsdp)
    lines = (root / "docs" / "guides" / "optimizers.md").read_text().splitlines()
    documented = [line for line in lines if line.startswith("| `")]
    assert documented == [f"| {row.label} | yes | yes | {row.sharded} | yes |" for row in ROWS]


def fit_twice(sharded):
    """Train with one optimizer, then with two others, and return the weights."""
    network = make_network()
    model = ComposerModel.from_module(network, F.cross_entropy)
    with Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=make_loader(),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        **({"parallelism_config": {"fsdp": {}}} if sharded else {}),
    ) as trainer:
        trainer.fit()
        first, *rest = network.parameters()  # those of now, which sharding has replaced
        trainer.fit(duration="1ep", optimizers=[torch.optim.AdamW([first], lr=0.01), torch.optim.SGD(rest, lr=0.1)])
        weights = trainer.strategy.model_state_dict(trainer.state.model)
        return {name.removeprefix("module."): value.clone() for name, value in weights.items()}


def fit_twice_on_ranks():
    warnings.simplefilter("ignore")
    return fit_twice(sharded=False), fit_twice(sharded=True)


def test_fit_continues_with_other_optimizers_on_ranks(tmp_path):
    network = make_network()
    first, *rest = network.parameters()
    begun = [torch.optim.SGD(network.parameters(), lr=0.1)]
    for optimizers in (begun, [torch.optim.AdamW([first], lr=0.01), torch.optim.SGD(rest, lr=0.1)]):
        for inputs, targets in make_loader():
            network.zero_grad()
            F.cross_entropy(network(inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
    for weights in run_ranks(fit_twice_on_ranks, store=tmp_path / "store", timeout_s=100)[0]:
        torch.testing.assert_close(weights, dict(network.state_dict()), rtol=0, atol=0)
