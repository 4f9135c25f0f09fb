"""What one rank chooses or refuses otherwise than the rest is an error on all of them, before they wait for another."""

import pytest
from torch import nn

from composer_dist import RankDisagreementError, dist, get_device
from composer_dist.testing import run_ranks
from composer_fsdp import FSDP, FSDPConfig, make_plan

CPU = get_device("cpu")


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4))

    def fsdp_wrap_fn(self, module):
        return self.answer if module is self[2] else False

    def activation_checkpointing_fn(self, module):
        return module is self[self.recomputed]


def model_of(answer=False, recomputed=0):
    model = nn.Module()
    model.net = Net()
    model.net.answer, model.net.recomputed = answer, recomputed
    return model


def shard(model, **settings):
    plan = make_plan(FSDPConfig(**settings), precision="amp_bf16", world_size=dist.get_world_size())
    FSDP(CPU, plan).prepare(model, [])


def complaint(model, **settings):
    with pytest.raises((ValueError, TypeError)) as refusal:
        shard(model, **settings)
    return type(refusal.value), str(refusal.value)


def complain():
    is_first = dist.get_global_rank() == 0
    ignoring = model_of()
    tied = model_of(True)
    if not is_first:
        tied.net[0] = nn.Linear(4, 4)
        tied.net[0].weight = tied.net[2].weight
    said = [
        complaint(model_of(answer=is_first)),
        complaint(model_of({"mixed_precision": "FULL" if is_first else "PURE"})),
        complaint(model_of({"sharding_strategy": "SHARD_GRAD_OP"} if is_first else True)),
        complaint(model_of(recomputed=0 if is_first else 2), activation_checkpointing=True),
        complaint(ignoring, ignored_modules=[ignoring.net[0 if is_first else 2]]),
        complaint(model_of(True if is_first else "yes")),
        complaint(tied),
    ]
    # Nobody has waited for anybody, and the group still works.
    return said, dist.all_gather_object(len(said))


DIFFERENCES = [
    "units.net.2.sharded with: [] on rank 0, nothing on rank 1",
    "units.net.2.mixed_precision: Dtypes(param=torch.float32",
    "units.net.2.sharding_strategy: 'SHARD_GRAD_OP' on rank 0, nothing on rank 1",
    "modules computed again: ['net.0'] on rank 0, ['net.2'] on rank 1",
    "ignored_modules: ['net.0'] on rank 0, ['net.2'] on rank 1",
]
REFUSALS = [(TypeError, "fsdp_wrap_fn returned 'yes'"), (ValueError, "Parameter sharing detected")]


def test_ranks_that_choose_otherwise_or_refuse_are_told_what_differs(tmp_path):
    (first, met), (second, _) = run_ranks(complain, store=tmp_path / "store")
    assert met == [7, 7]
    for (kind, said), (other_kind, other_said), text in zip(first, second, DIFFERENCES, strict=False):
        assert kind is other_kind is RankDisagreementError
        assert said == other_said
        assert text in said
    for (kind, said), (other_kind, other_said), (own_kind, text) in zip(first[5:], second[5:], REFUSALS, strict=True):
        assert (kind, other_kind) == (RankDisagreementError, own_kind)  # rank 1 knows more than that it has refused
        assert "refused: 'nothing' on rank 0" in said
        assert text in said
        assert text in other_said
