"""Ranks that differ find out at the start, and one rank's decision to stop is everybody's."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Algorithm, Callback, DataSpec, Evaluator, Event, Trainer
from composer.models import ComposerModel
from composer.optim import ConstantScheduler, LinearScheduler
from composer_dist import dist
from composer_dist.testing import run_ranks

BATCH = (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))


def make_trainer(**arguments) -> Trainer:
    model = ComposerModel.from_module(nn.Linear(2, 2), nn.functional.cross_entropy)
    given = {
        "train_dataloader": [BATCH] * 6,
        "device_train_microbatch_size": 4,
        "max_duration": "6ba",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": "cpu",
        "progress_bar": False,
    }
    return Trainer(model=model, **(given | arguments))


def construct(name: str) -> str:
    """Construct a Trainer of which one argument differs between the ranks, and return the error."""
    rank = dist.get_global_rank()
    evaluator = Evaluator(label="held out", dataloader=[BATCH], device_eval_microbatch_size=4)
    arguments = {
        "eval_interval": {"eval_dataloader": evaluator, "eval_interval": ["1ba", "2ba"][rank]},
        "ddp_sync_strategy": {"ddp_sync_strategy": ["single_auto_sync", "forced_sync"][rank]},
        "accumulate_train_batch_on_tokens": {"accumulate_train_batch_on_tokens": bool(rank)},
        "schedulers": {"schedulers": [LinearScheduler(), ConstantScheduler()][rank]},
        "max_duration": {"max_duration": ["6ba", "5ba"][rank]},
        "load_path": {"load_path": ["one.pt", "another.pt"][rank]},
    }
    with pytest.raises(ValueError, match=name) as error:
        make_trainer(**arguments[name])
    return str(error.value)


def construct_all() -> dict[str, str]:
    names = ("eval_interval", "ddp_sync_strategy", "accumulate_train_batch_on_tokens", "schedulers", "max_duration")
    return {name: construct(name) for name in (*names, "load_path")}


def test_every_rank_names_the_argument_in_which_they_differ(tmp_path):
    first, second = run_ranks(construct_all, store=tmp_path / "store")
    assert first == second
    assert all("on rank 0" in text and "on rank 1" in text for text in first.values())


def fit_with_loaders_of_unlike_batches() -> str:
    dataset = TensorDataset(torch.ones(16, 2), torch.zeros(16, dtype=torch.long))
    loader = DataLoader(dataset, batch_size=2 + 2 * dist.get_global_rank(), sampler=dist.get_sampler(dataset))
    trainer = make_trainer(train_dataloader=None, device_train_microbatch_size=2)
    with pytest.raises(ValueError, match="batch_size") as error:
        trainer.fit(train_dataloader=loader, duration="1ep")
    return str(error.value)


def test_a_dataloader_given_to_fit_is_compared_too(tmp_path):
    first, second = run_ranks(fit_with_loaders_of_unlike_batches, store=tmp_path / "store")
    assert first == second


class StopOnRankZero(Callback):
    def batch_end(self, state, logger):
        if dist.get_global_rank() == 0 and int(state.timestamp.batch) == 2:
            state.stop_training()


class StopByAlgorithm(Algorithm):
    def match(self, event, state):
        return event == Event.BATCH_END and dist.get_global_rank() == 0 and int(state.timestamp.batch) == 2

    def apply(self, event, state, logger):
        state.stop_training()


def train_until_rank_zero_stops(arguments) -> int:
    with make_trainer(**arguments, dist_timeout=20) as trainer:
        trainer.fit()
        return int(trainer.state.timestamp.batch)


@pytest.mark.parametrize("arguments", [{"callbacks": StopOnRankZero()}, {"algorithms": StopByAlgorithm()}], ids=list)
def test_a_rank_that_stops_training_stops_it_for_all(tmp_path, arguments):
    assert run_ranks(train_until_rank_zero_stops, arguments, store=tmp_path / "store") == [2, 2]


def train_where_one_rank_has_no_tokens() -> list[float]:
    targets = torch.full((4,), -100) if dist.get_global_rank() else torch.zeros(4, dtype=torch.long)
    batches = DataSpec(
        [(torch.ones(4, 2), targets)] * 2,
        get_num_tokens_in_batch=lambda batch: {"total": 4, "loss_generating": int((batch[1] != -100).sum())},
    )
    with make_trainer(train_dataloader=batches, accumulate_train_batch_on_tokens=True, seed=1) as trainer:
        trainer.fit()
        return [*trainer.state.model.state_dict()["module.module.bias"].tolist(), float(trainer.state.loss)]


def test_a_part_of_a_batch_without_tokens_weighs_nothing(tmp_path):
    first, second = run_ranks(train_where_one_rank_has_no_tokens, store=tmp_path / "store")
    assert all(math.isfinite(value) for value in first)
    assert first[:-1] == second[:-1]
    assert math.isnan(second[-1])  # the mean over nothing, which must not spread
