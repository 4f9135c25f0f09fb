"""SAM on several ranks: all look uphill by the whole batch, and end with the weights of one process."""

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


def train(microbatch_size: int) -> list[float]:
    dataset = TensorDataset(*make_data())
    model = ComposerModel.from_module(make_network(), nn.functional.mse_loss)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=SAMPLES // 2, sampler=dist.get_sampler(dataset)),
        device_train_microbatch_size=microbatch_size,
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=LR),
        algorithms=SAM(rho=RHO),
        device="cpu",
        progress_bar=False,
        seed=1,
    ) as trainer:
        trainer.fit()
    return torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()


def train_cut_and_uncut() -> list[list[float]]:
    return [train(SAMPLES // 2), train(1)]


def test_all_ranks_climb_by_the_gradient_of_the_whole_batch(tmp_path):
    """Each rank climbed by the gradient of its own part, and the weights depended on how many ranks there were."""
    trained = run_ranks(train_cut_and_uncut, store=tmp_path / "store", world_size=2)
    network = make_network()
    start = [parameter.detach().clone() for parameter in network.parameters()]

    def gradients() -> list[torch.Tensor]:
        inputs, targets = make_data()
        return list(torch.autograd.grad(nn.functional.mse_loss(network(inputs), targets), list(network.parameters())))

    # Foret et al., algorithm 1, in one process.
    up = gradients()
    norm = torch.cat([gradient.flatten() for gradient in up]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(network.parameters(), up, strict=True):
            parameter.add_(RHO * gradient / (norm + 1e-12))
    expected = torch.cat([(one - LR * gradient).flatten() for one, gradient in zip(start, gradients(), strict=True)])
    for weights in (weights for of_rank in trained for weights in of_rank):
        torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)
