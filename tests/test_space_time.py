"""The same global batch gives the same weights, however it is spread over ranks and over microbatches.

The reference is a loop written out here, which sees each global batch whole, in one process and without a Trainer.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import DataSpec, Trainer
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks

STEPS = 5
LR = 0.5
BATCH = 12
WORLDS = (1, 2, 3)
MICROBATCHES = {"one": BATCH, "two": None, "uneven": 4}  # samples of each; None cuts every rank's batch in two
SYNC_STRATEGIES = ("single_auto_sync", "multi_auto_sync", "forced_sync")
# Everything below is of size 1. A sum of `BATCH` terms taken in another order differs by at most `BATCH` roundings of
# its size; so does each of the activations and gradients it passes through, of which there are fewer than 8 a step.
TOLERANCE = STEPS * 8 * BATCH * torch.finfo(torch.float64).eps


def make_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_data(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_samples, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (num_samples,), generator=generator)


def train_by_hand(batches) -> list[torch.Tensor]:
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


def train(dataloader, loss=nn.functional.cross_entropy, **arguments) -> list[torch.Tensor]:
    network = make_network()
    model = ComposerModel.from_module(network, loss)
    with Trainer(
        model=model,
        train_dataloader=dataloader,
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
        device="cpu",
        progress_bar=False,
        seed=1,
        **arguments,
    ) as trainer:
        trainer.fit()
    return [parameter.detach().clone() for parameter in network.parameters()]


def microbatch_size(name: str) -> int:
    return MICROBATCHES[name] or BATCH // dist.get_world_size() // 2


def sampled_loader(num_samples: int) -> DataLoader:
    dataset = TensorDataset(*make_data(num_samples))
    return DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=dist.get_sampler(dataset))


def rank_shares(sizes) -> list[list[torch.Tensor]]:
    """Cut global batches of these sizes into the unequal parts of the ranks, and return this rank's."""
    inputs, targets = make_data(sum(sizes))
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    return [
        [whole.tensor_split(world_size)[rank] for whole in batch]
        for batch in zip(inputs.split(sizes), targets.split(sizes), strict=True)
    ]


def train_evenly() -> dict[str, list[torch.Tensor]]:
    weights = {}
    for micro, sync in itertools.product(MICROBATCHES, SYNC_STRATEGIES):
        weights[f"{micro}, {sync}"] = train(
            sampled_loader(STEPS * BATCH), device_train_microbatch_size=microbatch_size(micro), ddp_sync_strategy=sync
        )
    return weights


def train_unevenly(sizes) -> dict[str, list[torch.Tensor]]:
    return {
        f"{micro}, {sync}": train(rank_shares(sizes), device_train_microbatch_size=size, ddp_sync_strategy=sync)
        for (micro, size), sync in itertools.product((("one", BATCH), ("uneven", 3)), SYNC_STRATEGIES)
    }


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world_size: f"{world_size} ranks")
def world_size(request):
    return request.param


@pytest.fixture(scope="module")
def evenly_trained(world_size, tmp_path_factory):
    return run_ranks(train_evenly, store=tmp_path_factory.mktemp("even") / "store", world_size=world_size)


def assert_equal_weights(of_ranks, expected):
    for rank, weights in enumerate(of_ranks):
        for own, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"rank {rank}: {m}")  # noqa: B023


@pytest.mark.parametrize("sync", SYNC_STRATEGIES)
@pytest.mark.parametrize("micro", MICROBATCHES)
def test_ranks_and_microbatches_give_the_weights_of_the_whole_batch(evenly_trained, world_size, micro, sync):
    # A DistributedSampler deals the samples out in turn, so that W ranks with B/W samples each share each batch of B.
    inputs, targets = make_data(STEPS * BATCH)
    expected = train_by_hand(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    assert_equal_weights([weights[f"{micro}, {sync}"] for weights in evenly_trained], expected)


@pytest.mark.parametrize("last", [7, 4])
def test_a_batch_of_which_the_ranks_have_unequal_parts_counts_every_sample_alike(world_size, last, tmp_path):
    sizes = [BATCH, 11, BATCH, BATCH, last]
    inputs, targets = make_data(sum(sizes))
    expected = train_by_hand(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    trained = run_ranks(train_unevenly, sizes, store=tmp_path / "store", world_size=world_size)
    for case in trained[0]:
        assert_equal_weights([weights[case] for weights in trained], expected)


def make_sentences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return global batches of token vectors and targets; what lies beyond a sentence's end has the target -100."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(STEPS, BATCH, 6, 4, dtype=torch.float64, generator=generator)
    targets = torch.randint(3, (STEPS, BATCH, 6), generator=generator)
    lengths = torch.randint(1, 7, (STEPS, BATCH, 1), generator=generator)
    targets[torch.arange(6) >= lengths] = -100
    return list(zip(inputs, targets, strict=True))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())  # the mean over what has a target


def train_on_tokens() -> dict[str, list[torch.Tensor]]:
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    shares = [[whole.tensor_split(world_size)[rank] for whole in batch] for batch in make_sentences()]
    counts = DataSpec(
        shares,
        get_num_tokens_in_batch=lambda batch: {
            "total": batch[1].numel(),
            "loss_generating": int((batch[1] != -100).sum()),
        },
    )
    return {
        str(size): train(
            counts, loss=token_loss, device_train_microbatch_size=size, accumulate_train_batch_on_tokens=True
        )
        for size in (BATCH, 3)
    }


def test_sentences_of_unequal_length_count_by_their_tokens(world_size, tmp_path):
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9)
    for inputs, targets in make_sentences():
        optimizer.zero_grad()
        token_loss(network(inputs), targets).backward()
        optimizer.step()
    trained = run_ranks(train_on_tokens, store=tmp_path / "store", world_size=world_size)
    for size in (BATCH, 3):
        assert_equal_weights([weights[str(size)] for weights in trained], list(network.parameters()))
