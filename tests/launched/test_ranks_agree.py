"""Ranks that differ find out at the start, and one rank's decision to stop is everybody's."""

import math
import time
from pathlib import Path

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


class Stops(Callback):
    """Stops the training on some ranks, on an event in or after a batch."""

    def __init__(self, event, batch, ranks):
        self.event, self.batch, self.ranks = event, batch, ranks

    def run_event(self, event, state, logger):
        if event is self.event and state.timestamp.batch == self.batch and dist.get_global_rank() in self.ranks:
            state.stop_training()


class StopByAlgorithm(Algorithm):
    def match(self, event, state):
        return event == Event.BATCH_END and dist.get_global_rank() == 0 and int(state.timestamp.batch) == 2

    def apply(self, event, state, logger):
        state.stop_training()


# Epochs have three batches. Each event, the number of batches at that time, and that after which all ranks stop: one
# more, unless the ranks ask each other in any case, as after an evaluation and at the end of an epoch.
STOPS = [
    (Event.BATCH_START, 1, 3),  # of the second batch, with whose counts the request cannot be sent any more
    (Event.BATCH_END, 1, 2),
    (Event.BATCH_CHECKPOINT, 1, 2),
    (Event.BATCH_END, 3, 3),
    (Event.EVAL_END, 1, 1),
    (Event.EPOCH_END, 3, 3),
    (Event.EPOCH_CHECKPOINT, 3, 3),
]
RANKS = [(0,), (1,), (0, 1)]


def train_until_ranks_stop(folder):
    stops = []
    for number, (event, batch, _) in enumerate(STOPS):
        for ranks in RANKS:
            saved = Path(folder, f"{number}-{ranks}")
            with make_trainer(
                train_dataloader=[BATCH] * 3,
                max_duration="3ep",
                callbacks=Stops(event, batch, ranks),
                eval_dataloader=Evaluator(label="eval", dataloader=[BATCH], device_eval_microbatch_size=4),
                eval_interval="1ba" if event is Event.EVAL_END else "10ep",
                save_folder=str(saved),
                save_interval="10ep",
            ) as trainer:
                trainer.fit()
            stops.append((trainer.state.timestamp.num_batches, trainer.state.stopped_duration))
            assert len(list(saved.glob("ep*-rank0.pt"))) == 1, list(saved.iterdir())
    with make_trainer(algorithms=StopByAlgorithm()) as trainer:
        trainer.fit()
    return [*stops, trainer.state.timestamp.num_batches]


def test_a_rank_that_stops_training_stops_it_for_all_after_the_same_batch(tmp_path):
    first, second = run_ranks(train_until_ranks_stop, str(tmp_path), store=tmp_path / "store")
    assert first == second == [*((batch, "3ep") for _, _, batch in STOPS for _ in RANKS), 3]


class Shortens(Callback):
    """Assigns a shorter duration on some ranks after the first batch."""

    def __init__(self, ranks):
        self.ranks = ranks

    def batch_end(self, state, logger):
        if state.timestamp.batch == 1 and dist.get_global_rank() in self.ranks:
            state.max_duration = "4ba"


def train_with_a_shorter_duration():
    ends = []
    for ranks in RANKS:
        with make_trainer(callbacks=Shortens(ranks)) as trainer:
            trainer.fit()
        ends.append((trainer.state.timestamp.num_batches, str(trainer.state.max_duration)))
    return ends


def test_a_shorter_duration_that_a_callback_assigns_is_kept_to_the_batch(tmp_path):
    first, second = run_ranks(train_with_a_shorter_duration, store=tmp_path / "store")
    assert first == second == [(4, "4ba")] * len(RANKS)


class Sleeps(Callback):
    """Makes each batch last at least 50 ms, and reads the clock."""

    def __init__(self):
        self.seen_s = []

    def after_loss(self, state, logger):
        time.sleep(0.05)

    def epoch_end(self, state, logger):
        self.seen_s.append(state.timestamp.total_wct.total_seconds())


def train_slowly():
    clocks = []
    for batches, duration in ((1, "3ep"), (2, "3ba")):
        sleeps = Sleeps()
        with make_trainer(train_dataloader=[BATCH] * batches, max_duration=duration, callbacks=sleeps) as trainer:
            trainer.fit()
        clocks += [*sleeps.seen_s, trainer.state.timestamp.total_wct.total_seconds()]
    return clocks


def test_the_clock_of_several_ranks_counts_every_batch(tmp_path):
    first, second = run_ranks(train_slowly, store=tmp_path / "store")
    assert first == second
    least_s = [0.05, 0.1, 0.15, 0.15, 0.1, 0.15]  # at the ends of three epochs and of training; of one, and of training
    assert len(first) == len(least_s)
    assert all(seconds >= least for seconds, least in zip(first, least_s, strict=True)), first


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
