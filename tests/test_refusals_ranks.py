"""Arguments of a Trainer that one rank alone refuses are an error on all ranks, in the same words."""

import time
import traceback

import pytest
import torch
from torch import nn

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer_dist import RankDisagreementError, dist
from composer_dist.testing import run_ranks


def make(**arguments):
    network = nn.Linear(3, 2)
    settings = {
        "train_dataloader": [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))],
        "optimizers": torch.optim.SGD(network.parameters(), lr=0.1),
        "max_duration": "1ba",
        "device_train_microbatch_size": 4,
        "device": "cpu",
        "progress_bar": False,
    }
    model = ComposerModel.from_module(network, nn.functional.cross_entropy)
    return Trainer(**{"model": model, **settings, **arguments})


CASES = [  # what each rank gives, and what of its refusal all are told
    ({1: {"max_duration": "2 weeks"}}, ["rank 1: ValueError: ", "2 weeks"]),
    ({0: {"parallelism_config": {"fsdp": {"shardng_strategy": "FULL_SHARD"}}}}, ["rank 0: TypeError", "mean 'shardi"]),
    ({1: {"max_duraton": "1ba"}}, ["rank 1: TypeError: ", "mean 'max_duration'"]),
    ({0: {"grad_clip_norm": "much"}}, ["rank 0: ValueError: grad_clip_norm='much'"]),
    ({1: {"device": "toaster"}}, ["rank 1: ValueError", "'toaster'"]),
    (
        {0: {"dist_timeout": -1}, 1: {"seed": -1}},
        ["rank 0: ValueError: dist_timeout=-1", "rank 1: ValueError: ", "seed"],
    ),
]


def refuse():
    rank, said = dist.get_global_rank(), []
    for of_ranks, _ in CASES:
        with pytest.raises(RankDisagreementError) as refusal:
            make(**of_ranks.get(rank, {}))
        # Who has refused sees where, too.
        assert (refusal.value.__cause__ is not None) == (rank in of_ranks)
        said.append(str(refusal.value))
    with pytest.raises(TypeError, match="on_divergence=3") as alike:  # as each rank would say alone
        make(on_divergence=3)
    with pytest.raises(TypeError, match="is no LoggerDestination"):  # which has an address of its own on each rank
        make(loggers=object())
    with make() as trainer:  # nobody waits for anybody any more
        trainer.fit()
    return said, str(alike.value)


def test_every_rank_is_told_which_rank_refuses_what(tmp_path):
    first, second = run_ranks(refuse, store=tmp_path / "store")
    assert first == second
    for text, (of_ranks, parts) in zip(first[0], CASES, strict=True):
        assert text.startswith(f"{len(of_ranks)} of 2 ranks cannot use the arguments")
        assert all(part in text for part in parts)
        assert f"rank {1 - min(of_ranks)}: " not in text or len(of_ranks) == 2


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def train_with_unused(sync):
    network = WithUnused()
    trainer = make(
        model=ComposerModel.from_module(network, nn.functional.cross_entropy),
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
        max_duration="3ba",
        train_dataloader=[(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))] * 3,
        ddp_sync_strategy=sync,
    )
    try:
        trainer.fit()
    except RuntimeError as error:
        return "".join(traceback.format_exception_only(error))
    return int(trainer.state.timestamp.batch)


def test_a_layer_without_a_gradient_is_told_an_argument_that_a_trainer_has(tmp_path):
    """Seen before: only PyTorch's advice to pass find_unused_parameters=True, which no Trainer takes."""
    for said in run_ranks(train_with_unused, None, store=tmp_path / "first"):
        assert "ddp_sync_strategy='forced_sync'" in said
    assert run_ranks(train_with_unused, "forced_sync", store=tmp_path / "second") == [3, 3]


def fail_after_another(folder):
    trainer = make(callbacks=FailsFirst(folder))
    try:
        trainer.fit()
    except Exception as error:
        (folder / str(dist.get_global_rank())).touch()
        return "".join(traceback.format_exception(error)).splitlines()[-2:]


class FailsFirst(Callback):
    def __init__(self, folder):
        self.folder = folder

    def batch_start(self, state, logger):
        if dist.get_global_rank() == 1:
            raise OSError("disk full")
        while not (self.folder / "1").exists():
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")  # as gloo says it


def test_the_failure_of_the_first_rank_is_the_last_thing_that_another_says(tmp_path):
    """Seen before: "Connection closed by peer", with no word of what had happened there."""
    waiting, failing = run_ranks(fail_after_another, tmp_path, store=tmp_path / "store")
    assert failing[0] == "OSError: disk full"
    assert waiting == failing
