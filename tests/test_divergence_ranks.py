"""What is not finite on one rank only is found on all ranks alike, and no rank's weights move."""

import contextlib
import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate  # it has no public name
from torch.distributed.device_mesh import init_device_mesh

from composer import Trainer
from composer.algorithms import SAM
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.trainer.divergence import DivergenceError
from composer_dist import dist
from composer_dist.testing import run_ranks

BATCH, NUM_BATCHES, BAD = 4, 6, 3  # per rank


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def make_batches(rank, num_batches=NUM_BATCHES):
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(BATCH, 3, generator=generator), torch.randint(2, (BATCH,), generator=generator))
        for _ in range(num_batches)
    ]


class Batches(list):
    batch_size = BATCH


class IgnoredLabels:
    """The mean of no labels on rank 1, in one batch: 0/0, with gradients of 0."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, outputs, targets):
        is_ignored = dist.get_global_rank() == 1 and self.num_calls == BAD
        self.num_calls += 1
        return nn.functional.cross_entropy(outputs, torch.full_like(targets, -100) if is_ignored else targets)


STRATEGIES = {
    "DDP": {},
    "FSDP": {"parallelism_config": {"fsdp": {}}},
    **{
        f"DeepSpeed {stage}": {
            "deepspeed_config": {"train_batch_size": 2 * BATCH, "zero_optimization": {"stage": stage}}
        }
        for stage in range(4)
    },
}


def train_by(settings, make_loss):
    network, logged, batches = make_network(), InMemoryLogger(), Batches(make_batches(dist.get_global_rank()))
    with Trainer(
        model=ComposerModel.from_module(network, make_loss()),
        train_dataloader=batches,
        max_duration="1ep",
        optimizers=torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9),
        device_train_microbatch_size=BATCH,
        device="cpu",
        progress_bar=False,
        loggers=logged,
        **settings,
    ) as trainer:
        with contextlib.suppress(DivergenceError):
            trainer.fit()
        weights = trainer.strategy.model_state_dict(trainer.state.model)
        losses = [float(loss) for _, loss in logged.data["loss/train/total"]]
        divergences = [divergence.batch for divergence in trainer.divergences]
        return [weight.detach().clone() for weight in weights.values()], losses, divergences


def train_with_either_fault(settings):
    return train_by(settings, IgnoredLabels), train_by(settings, lambda: Fault("loss", 1))[2]


@pytest.mark.slow
@pytest.mark.parametrize("settings", STRATEGIES.values(), ids=STRATEGIES)
def test_a_rank_whose_labels_are_all_ignored_trains_on_as_one_process_does(tmp_path, settings):
    """A DivergenceError ended the run on all ranks, although the gradients of such a batch are 0."""
    if "deepspeed_config" in settings:
        pytest.importorskip("deepspeed")
    expected, means = make_network(), []
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.9)
    for index, parts in enumerate(zip(make_batches(0), make_batches(1), strict=True)):
        optimizer.zero_grad()
        kept = parts[:1] if index == BAD else parts
        losses = [nn.functional.cross_entropy(expected(inputs), targets) for inputs, targets in kept]
        (sum(losses) / 2).backward()
        optimizer.step()
        means.append(float(sum(losses).detach()) / len(losses))
    results = run_ranks(train_with_either_fault, settings, store=tmp_path / "store")
    for (weights, losses, divergences), of_nan in results:
        assert (divergences, of_nan) == ([], [BAD])
        assert losses == pytest.approx(means, rel=1e-5)  # a few float32 roundings, by six steps
        for own, other in zip(weights, expected.parameters(), strict=True):
            torch.testing.assert_close(own, other.detach(), rtol=1e-5, atol=1e-6)


class Fault:
    """A loss that goes wrong on rank 1, in the first microbatch of one batch, in one of several ways."""

    def __init__(self, kind, num_microbatches, looks=1):
        self.kind, self.bad_call, self.num_calls = kind, BAD * num_microbatches * looks, 0

    def __call__(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        is_bad = dist.get_global_rank() == 1 and self.num_calls == self.bad_call
        self.num_calls += 1
        if not is_bad:
            return loss
        if self.kind == "loss":
            return loss * math.nan
        return loss + (outputs - outputs.detach()).sum().sqrt()  # the slope of the root at 0


def train(kind, microbatch_size, num_batches=NUM_BATCHES, algorithms=(), **settings):
    network = make_network()
    looks = 2 if algorithms else 1
    loss = Fault(kind, BATCH // microbatch_size, looks) if kind else nn.functional.cross_entropy
    with Trainer(
        model=ComposerModel.from_module(network, loss),
        train_dataloader=make_batches(dist.get_global_rank(), num_batches),
        max_duration="1ep",
        algorithms=list(algorithms),
        optimizers=torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9),
        device_train_microbatch_size=microbatch_size,
        device="cpu",
        progress_bar=False,
        **settings,
    ) as trainer:
        error = None
        try:
            trainer.fit()
        except DivergenceError as raised:
            error = str(raised)
        batches = [divergence.batch for divergence in trainer.divergences]
        return [p.detach() for p in network.parameters()], batches, error


def train_cases(cases):
    return [train(*case, **settings) for case, settings in cases]


def assert_alike(results):
    """Check that all ranks ended with the same weights and saw the same, and return these."""
    first = results[0]
    for weights, batches, error in results[1:]:
        assert batches == first[1]
        assert (error is None) == (first[2] is None)
        for own, other in zip(weights, first[0], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0)
    return first


KINDS = ("loss", "gradient")
MICROBATCHES = (BATCH, 1)
SYNC = ("single_auto_sync", "multi_auto_sync", "forced_sync")


def test_no_rank_steps_where_one_rank_has_no_finite_loss_or_gradient(tmp_path):
    settings = list(itertools.product(KINDS, MICROBATCHES, SYNC))
    cases = [((kind, size), {"ddp_sync_strategy": sync}) for kind, size, sync in settings]
    references = [((None, size, BAD), {}) for size in MICROBATCHES]
    by_rank = run_ranks(train_cases, [*cases, *references], store=tmp_path / "store")
    results = [assert_alike(case) for case in zip(*by_rank, strict=True)]
    expected = {size: results[len(cases) + index][0] for index, size in enumerate(MICROBATCHES)}
    for (kind, size, sync), (weights, batches, error) in zip(settings, results[: len(cases)], strict=True):
        assert batches == [BAD], (kind, size, sync)
        assert f"Batch {BAD} of epoch 0" in error
        # The synchronisation in several pieces rounds in another order.
        torch.testing.assert_close(weights, expected[size], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_skip_the_same_batch(tmp_path, kind):
    case = ((kind, 2), {"on_divergence": "skip"})
    (weights, batches, error) = assert_alike([r[0] for r in run_ranks(train_cases, [case], store=tmp_path / "store")])
    assert batches == [BAD]
    assert error is None
    assert all(torch.isfinite(p).all() for p in weights)


def test_sam_is_left_at_the_weights_before_the_way_up(tmp_path):
    sam = {"algorithms": [SAM()]}
    cases = [(("loss", BATCH), sam), (("gradient", BATCH), sam), ((None, BATCH, BAD), sam)]
    by_rank = run_ranks(train_cases, cases, store=tmp_path / "store")
    results = [assert_alike(case) for case in zip(*by_rank, strict=True)]
    expected = results[-1][0]
    for weights, batches, _ in results[:-1]:
        assert batches == [BAD]
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def ruin_weights(ruined_rank, folder):
    """Make the weights NaN on one rank in the last batch, where no loss follows that could show it."""

    class Ruins(Callback):
        def batch_end(self, state, logger):
            if dist.get_global_rank() == ruined_rank and state.timestamp.batch == 2:
                with torch.no_grad():
                    next(state.model.parameters()).fill_(math.nan)

    settings = {"callbacks": [Ruins()], "save_folder": folder, "save_interval": "1ba"}
    return train(None, BATCH, 2, **settings)[1:]


@pytest.mark.parametrize("ruined_rank", [0, 1])
def test_weights_that_one_rank_has_ruined_are_saved_by_none(tmp_path, ruined_rank):
    folder = tmp_path / "saved"
    results = run_ranks(ruin_weights, ruined_rank, str(folder), store=tmp_path / "store")
    assert [batches for batches, _ in results] == [[1], [1]]
    assert all("They are not saved" in error for _, error in results)
    assert sorted(path.name for path in folder.glob("ep*.pt")) == ["ep0-ba1-rank0.pt"]


def replicate_all(network):
    replicate(network, mesh=init_device_mesh("cpu", (2,)))


def train_weights_of_its_own(settings, share):
    """Train weights that the other rank has no part of, and let rank 1 find a bad gradient of its own."""
    network = make_network()
    if share is not None:
        share(network)
    with Trainer(
        model=ComposerModel.from_module(network, Fault("gradient", 1)),
        train_dataloader=make_batches(dist.get_global_rank()),
        max_duration="1ep",
        optimizers=torch.optim.SGD(network.parameters(), lr=0.5),
        device_train_microbatch_size=BATCH,
        device="cpu",
        progress_bar=False,
        parallelism_config={"fsdp": settings},
    ) as trainer:
        with pytest.raises(DivergenceError):
            trainer.fit()
        return [divergence.batch for divergence in trainer.divergences], int(trainer.state.timestamp.batch)


SHARDINGS = {
    "shards": ({}, None),
    "whole weights": ({"sharding_strategy": "NO_SHARD"}, None),
    "weights of its own": ({"process_group": "self"}, None),
    "what its owner has replicated": ({"auto_wrap": False}, replicate_all),
}


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_no_rank_steps_where_one_rank_has_the_bad_part_of_a_gradient(tmp_path, sharding):
    assert run_ranks(train_weights_of_its_own, *sharding, store=tmp_path / "store") == [([BAD], BAD)] * 2


class Steep(nn.Module):
    """Has one weight of several whose gradient is infinite, on rank 1 in one batch."""

    def __init__(self):
        super().__init__()
        self.first, self.steep, self.last = nn.Linear(3, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 2)
        self.num_calls = 0

    def forward(self, inputs):
        outputs = self.last(self.first(inputs))
        is_bad = dist.get_global_rank() == 1 and self.num_calls == self.bad_call
        self.num_calls += 1
        return outputs + (self.steep - self.steep.detach()).sum().sqrt() if is_bad else outputs + self.steep.sum() * 0


def train_steep(action, microbatch_size):
    torch.manual_seed(0)
    network = Steep()
    network.bad_call = BAD * BATCH // microbatch_size  # in the first microbatch, and the last one is good
    with Trainer(
        model=ComposerModel.from_module(network, nn.functional.cross_entropy),
        train_dataloader=make_batches(dist.get_global_rank()),
        max_duration="1ep",
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
        device_train_microbatch_size=microbatch_size,
        device="cpu",
        progress_bar=False,
        parallelism_config={"fsdp": {}},
        on_divergence=action,
    ) as trainer:
        try:
            trainer.fit()
            said = ""
        except DivergenceError as error:
            said = str(error)
        weights = trainer.strategy.model_state_dict(trainer.state.model)
        is_finite = all(torch.isfinite(weight).all() for weight in weights.values())
        return [each.batch for each in trainer.divergences], int(trainer.state.timestamp.batch), is_finite, said


def train_steeps():
    return [train_steep(action, size) for action in ("raise", "skip") for size in (BATCH, 2)]


def test_the_bad_part_of_a_sharded_gradient_is_named_and_its_batch_left_out_by_all(tmp_path):
    for results in run_ranks(train_steeps, store=tmp_path / "store"):
        for batches, num_batches, is_finite, said in results[:2]:
            assert (batches, num_batches, is_finite) == ([BAD], BAD, True)
            assert "The gradients of module.steep are not finite." in said
        assert results[2:] == [([BAD], NUM_BATCHES, True, "")] * 2
