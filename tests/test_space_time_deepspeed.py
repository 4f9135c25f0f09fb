"""With DeepSpeed too, the same global batch gives the same weights, at every stage and however the batch is cut."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from composer import Trainer
from composer.models import ComposerModel
from composer.optim import Schedule
from composer_dist import dist
from composer_dist.testing import run_ranks

STEPS = 5
LR = 0.05
BATCH = 8
NUM_SAMPLES = STEPS * BATCH - 4  # the last batch is cut into fewer microbatches than the others
STAGES = (0, 1, 2, 3)
MICROBATCHES = {"one": 1, "two": 2, "four": 4}  # how many each rank's batch is cut into
# As for DDP, in the dtype in which DeepSpeed keeps its weights: everything below is of size 1, a sum of `BATCH` terms
# in another order differs by at most `BATCH` roundings, and passes through fewer than 8 sums a step.
TOLERANCE = STEPS * 8 * BATCH * torch.finfo(torch.float32).eps


def make_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(NUM_SAMPLES, 4, generator=generator),
        torch.randint(3, (NUM_SAMPLES,), generator=generator),
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)


def falling(state):
    return 1 - state.timestamp.num_batches / STEPS


SCHEDULES = [falling, *(Schedule(target, falling) for target in ("lr", "momentum", "weight_decay"))]


class Batches:
    """As many indices as there are in each of the batches of a sampler; its size is not known."""

    def __init__(self, sampler, size):
        self.sampler = sampler
        self._batches = BatchSampler(sampler, size, drop_last=False)

    def __iter__(self):
        return iter(self._batches)

    def __len__(self):
        return len(self._batches)


def train(stage: int, num_microbatches: int, is_known: bool = True, schedulers=None) -> list[torch.Tensor]:
    dataset = TensorDataset(*make_data())
    per_rank = BATCH // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=per_rank, sampler=dist.get_sampler(dataset))
    size, config = {"device_train_microbatch_size": per_rank // num_microbatches}, {}
    if not is_known:
        loader = DataLoader(dataset, batch_sampler=Batches(loader.sampler, per_rank))
        size, config = {}, {"train_batch_size": BATCH}
    model = ComposerModel.from_module(make_network(), nn.functional.cross_entropy)
    with Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="1ep",
        optimizers=make_optimizer(model),
        device="cpu",
        deepspeed_config={"zero_optimization": {"stage": stage}, **config},
        progress_bar=False,
        seed=1,
        schedulers=schedulers,
        **size,
    ) as trainer:
        trainer.fit()
        weights = trainer.strategy.model_state_dict(trainer.state.model)
    return [weight.clone() for weight in weights.values()]


def train_all() -> dict[str, list[torch.Tensor]]:
    found = {
        f"{stage}, {name}": train(stage, number)
        for stage, (name, number) in itertools.product(STAGES, MICROBATCHES.items())
    }
    # Seen before: "the dataloader has no attribute batch_size", although deepspeed_config said it.
    found |= {f"{stage}, unknown": train(stage, 1, is_known=False) for stage in STAGES}
    with pytest.raises(ValueError, match="schedule of 'batch_size', which cannot be combined with deepspeed_config"):
        train(0, 1, schedulers=Schedule("batch_size", falling))
    return found | {f"{stage}, scheduled": train(stage, 2, schedulers=SCHEDULES) for stage in STAGES}


@pytest.fixture(scope="module", params=(1, 2), ids=lambda world_size: f"{world_size} ranks")
def trained(request, tmp_path_factory):
    store = tmp_path_factory.mktemp("deepspeed") / "store"
    return run_ranks(train_all, store=store, world_size=request.param, timeout_s=240)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro", [*MICROBATCHES, "unknown", "scheduled"])
def test_every_stage_gives_the_weights_of_the_whole_batch(trained, stage, micro):
    network = make_network()
    optimizer = make_optimizer(network)
    inputs, targets = make_data()
    for step, (batch, labels) in enumerate(zip(inputs.split(BATCH), targets.split(BATCH), strict=True)):
        if micro == "scheduled":
            part = 1 - step / STEPS
            optimizer.param_groups[0].update(lr=LR * part**2, momentum=0.9 * part, weight_decay=0.1 * part)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(batch), labels).backward()
        optimizer.step()
    for weights in trained:
        for own, expected in zip(weights[f"{stage}, {micro}"], network.parameters(), strict=True):
            torch.testing.assert_close(own, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
