"""Models that are sharded by one function and trained by a loop of one's own, as one process with the whole batch."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from composer_dist import DeviceCPU, RankDisagreementError, dist, seed_all
from composer_dist.testing import run_ranks
from composer_fsdp import FSDPConfig, parallelize_composer_model, parallelize_model
from composer_fsdp.state_dicts import get_model

STEPS, BATCH = 3, 8
# Two ranks add up the same numbers in another order.
TOLERANCE = 64 * torch.finfo(torch.float32).eps


class Block(nn.Linear):
    pass


class Net(nn.Module):
    """Has what cannot be cut into shards, and a block that goes by several names."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList([Block(6, 6)] * 2)
        self.offsets = nn.ParameterList([torch.ones(6)])
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, inputs):
        inputs = self.stem(inputs)
        for block in self.blocks:
            inputs = block(inputs).relu()
        return self.head(inputs + self.offsets[0]) * self.temperature + self.nothing.sum()

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)

    activation_checkpointing_fn = fsdp_wrap_fn


class Model(nn.Module):
    """Its children are sharded; what it has itself is not."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.left_alone = nn.Linear(3, 3)
        self.left_alone._fsdp_wrap = False
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return self.left_alone(self.net(inputs)) * self.scale


def train(model, optimizer, share=slice(None)):
    """Train, each step in two backward passes."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(BATCH, 4, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)
        optimizer.zero_grad()
        for part in zip(inputs[share].chunk(2), targets[share].chunk(2), strict=True):
            (F.cross_entropy(model(part[0]), part[1]) / 2).backward()
        optimizer.step()


def distance(make, shard, **settings):
    """Return how far the weights of two ranks are from those of one process."""
    seed_all(3)
    model, alone = make(), make()
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **settings)
    shard(model, optimizer)
    rank, own = dist.get_global_rank(), BATCH // dist.get_world_size()
    train(model, optimizer, slice(rank * own, rank * own + own))
    train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01))
    weights, expected = get_model(model), alone.state_dict()
    assert list(weights) == list(expected)
    return max((weights[name] - expected[name]).abs().sum().item() for name in expected)


def by_function(model, optimizer, **settings):
    parallelize_model(model, FSDPConfig(min_params=None, **settings), optimizer, device="cpu")


def recomputing(model, optimizer):
    by_function(model, optimizer, activation_checkpointing=True)


def ignoring(model, optimizer):
    by_function(model, optimizer, ignored_modules=[model.stem])


def by_children(model, optimizer):
    parallelize_composer_model(model, optimizer, FSDPConfig(), device="cpu")


def distances():
    distances = [distance(Net, shard) for shard in (by_function, recomputing, ignoring)]
    distances.append(distance(Model, by_children))
    with pytest.warns(UserWarning, match="fused=True is not followed"):
        distances.append(distance(Model, by_children, fused=True))
    return distances


def test_whatever_a_model_holds_is_trained_as_by_one_process(tmp_path):
    for distances_of_rank in run_ranks(distances, store=tmp_path / "store"):
        assert all(distance < TOLERANCE for distance in distances_of_rank), distances_of_rank


def fill(module):
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.25)


def complaint(config, **arguments):
    with pytest.raises((ValueError, TypeError, KeyError)) as refusal:
        parallelize_model(Net(), config, device="cpu", **arguments)
    return type(refusal.value), str(refusal.value)


def fail_on_rank_one(module):
    if dist.get_global_rank():
        raise KeyError("no weights")
    fill(module)


def begin_and_complain():
    warnings.simplefilter("ignore")
    is_first = dist.get_global_rank() == 0
    with torch.device("meta"):
        model, failing = Net(), Net()
    parallelize_model(model, FSDPConfig(), device="cpu", param_init_fn=fill)
    values = {value for weight in get_model(model).values() for value in weight.flatten().tolist()}
    seed_all(3)
    said = [
        complaint(FSDPConfig(sharding_strategy="FULL_SHARD" if is_first else "SHARD_GRAD_OP")),
        complaint(FSDPConfig(sharding_strategy="FULL_SHARD" if is_first else "ALL")),
        complaint(FSDPConfig(), fsdp_wrap_policy=None if is_first else 5),
    ]
    with pytest.raises((RankDisagreementError, KeyError)) as refusal:
        parallelize_model(failing, FSDPConfig(), device="cpu", param_init_fn=fail_on_rank_one)
    said.append((type(refusal.value), str(refusal.value)))
    return values, said, dist.all_gather_object(len(said))


def test_what_one_rank_gives_otherwise_or_fails_at_is_told_to_all(tmp_path):
    (values, first, met), (_, second, _) = run_ranks(begin_and_complain, store=tmp_path / "store")
    assert values == {0.25}  # by the function that was given, although linear layers have a reset_parameters
    assert met == [4, 4]
    assert first[0] == second[0]
    assert "settings.sharding_strategy: 'FULL_SHARD' on rank 0, 'SHARD_GRAD_OP' on rank 1" in first[0][1]
    refused = [(ValueError, "sharding_strategy='ALL'"), (TypeError, "the policy 5 is a int"), (KeyError, "no weights")]
    for (kind, said), (own_kind, _), (expected, text) in zip(first[1:], second[1:], refused, strict=True):
        assert (kind, own_kind) == (RankDisagreementError, expected)
        assert text in said


class NamedGPU(DeviceCPU):
    """A CPU for which the default precision of GPUs is chosen."""

    name = "gpu"


def dtype_by_default(dtype):
    model = Net().to(dtype)
    parallelize_model(model, FSDPConfig(min_params=None), device=NamedGPU())
    return model(torch.ones(2, 4)).dtype


@pytest.mark.parametrize(("weights", "computed"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)])
def test_the_default_precision_of_gpus_is_bfloat16_for_weights_in_bfloat16(tmp_path, weights, computed):
    """It was amp_fp16, whose GradScaler cannot unscale gradients in bfloat16."""
    assert run_ranks(dtype_by_default, weights, store=tmp_path / "store") == [computed, computed]
