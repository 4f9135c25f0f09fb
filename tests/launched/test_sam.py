"""SAM on several ranks: each looks uphill by its own part of the batch, and all step alike."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import SAM
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks

LR, RHO, SAMPLES = 0.1, 0.5, 8


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 3, generator=generator).double(), torch.randn(SAMPLES, 1, generator=generator).double()


def make_network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 1).double()


def train() -> list[float]:
    dataset = TensorDataset(*make_data())
    model = ComposerModel.from_module(make_network(), nn.functional.mse_loss)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=SAMPLES // 2, sampler=dist.get_sampler(dataset)),
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=LR),
        algorithms=SAM(rho=RHO),
        device="cpu",
        progress_bar=False,
        seed=1,
    ) as trainer:
        trainer.fit()
    return torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()


def test_each_rank_climbs_by_its_own_gradient_and_steps_by_the_mean(tmp_path):
    trained = run_ranks(train, store=tmp_path / "store", world_size=2)
    network = make_network()
    inputs, targets = make_data()
    gradients = []
    for rank in range(2):  # Foret et al., algorithm 1, with the two halves of the batch as two machines
        own = make_network()
        nn.functional.mse_loss(own(inputs[rank::2]), targets[rank::2]).backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in own.parameters()]).norm()
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.add_(RHO * parameter.grad / (norm + 1e-12))
        own.zero_grad()
        nn.functional.mse_loss(own(inputs[rank::2]), targets[rank::2]).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in own.parameters()]))
    start = torch.cat([parameter.flatten() for parameter in network.parameters()]).detach()
    expected = start - LR * (gradients[0] + gradients[1]) / 2
    for weights in trained:
        torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)
