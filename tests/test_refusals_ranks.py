"""Arguments of a Trainer that one rank alone refuses are an error on all ranks, in the same words."""

import pytest
import torch
from torch import nn

from composer import Trainer
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
    return Trainer(model=ComposerModel.from_module(network, nn.functional.cross_entropy), **{**settings, **arguments})


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
