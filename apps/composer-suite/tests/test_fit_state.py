"""What a `fit` begins with, and what it shows to those who watch: seeds, mode, precision, batches."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from composer.core import Algorithm, Callback, Event
from composer.models import ComposerModel


class DrawOnInit(Algorithm):
    def __init__(self, draw):
        self.draw = draw

    def match(self, event, state):
        return event == Event.INIT

    def apply(self, event, state, logger):
        self.draw()


@pytest.mark.parametrize(
    "draw",
    [lambda: float(torch.rand(())), np.random.random, random.random],
    ids=["torch", "numpy", "python"],
)
def test_what_algorithms_draw_on_init_changes_no_draw_of_training(make_trainer, draw):
    class Draws(Callback):
        def __init__(self):
            self.drawn = []

        def batch_start(self, state, logger):
            self.drawn.append(draw())

    with_algorithm, alone = Draws(), Draws()
    make_trainer(max_duration="1ba", callbacks=with_algorithm, algorithms=DrawOnInit(draw)).fit()
    make_trainer(max_duration="1ba", callbacks=alone).fit()
    assert with_algorithm.drawn == alone.drawn


def test_what_algorithms_draw_on_init_changes_neither_shuffling_nor_dropout(make_trainer, make_loader):
    weights = []
    for algorithms in ([], [DrawOnInit(lambda: torch.rand(()))]):
        torch.manual_seed(0)
        model = ComposerModel.from_module(nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 2)), cross_entropy)
        loader = make_loader(8, 4, shuffle=True)
        make_trainer(model=model, train_dataloader=loader, max_duration="1ep", algorithms=algorithms).fit()
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)


def test_reset_time_in_the_middle_of_an_epoch_begins_a_new_one(make_trainer, make_loader, make_data):
    seen = []

    class Inputs(Callback):
        def batch_start(self, state, logger):
            seen.append(state.batch[0])

    trainer = make_trainer(train_dataloader=make_loader(12, 4), max_duration="2ba", callbacks=Inputs())
    trainer.fit()
    seen.clear()
    trainer.fit(reset_time=True, duration="1ep")
    assert torch.equal(torch.cat(seen), make_data(12).tensors[0])


def test_a_fit_may_have_another_precision(make_trainer):
    dtypes = []

    class Dtypes(Callback):
        def after_forward(self, state, logger):
            dtypes.append(state.outputs.dtype)

    trainer = make_trainer(precision="fp32", max_duration="1ba", callbacks=Dtypes())
    trainer.fit()
    trainer.fit(duration="1ba", precision="amp_bf16")
    assert dtypes == [torch.float32, torch.bfloat16]


def test_a_model_in_eval_mode_is_trained_in_train_mode(make_trainer):
    modes = []

    class Modes(Callback):
        def before_forward(self, state, logger):
            modes.append(state.model.training)

    trainer = make_trainer(max_duration="1ba", callbacks=Modes())
    trainer.state.model.eval()
    trainer.fit()
    assert modes == [True]


def test_the_whole_batch_is_back_when_its_microbatches_are_done(make_trainer, make_loader):
    sizes = []

    class Sizes(Callback):
        def batch_end(self, state, logger):
            sizes.append(len(state.batch[0]))

    trainer = make_trainer(
        train_dataloader=make_loader(6, 4), device_train_microbatch_size=1, max_duration="1ep", callbacks=Sizes()
    )
    trainer.fit()
    assert sizes == [4, 2]
