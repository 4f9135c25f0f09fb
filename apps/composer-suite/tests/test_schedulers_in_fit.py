"""The learning rate each batch sees."""

import pytest
import torch

from composer.core import Callback
from composer.optim import LinearScheduler


class Rates(Callback):
    def __init__(self):
        self.rates = []

    def batch_start(self, state, logger):
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


@pytest.fixture
def run(make_trainer, make_model, make_loader):
    def run(make_scheduler, **settings):
        model, rates = make_model(), Rates()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = make_trainer(
            model=model,
            optimizers=optimizer,
            schedulers=make_scheduler(optimizer),
            callbacks=rates,
            **{"train_dataloader": make_loader(16, 4), **settings},
        )
        trainer.fit()
        return rates.rates, optimizer.param_groups[0]["lr"]

    return run


def test_a_composer_scheduler_steps_every_batch(run):
    rates, last = run(lambda optimizer: LinearScheduler(), max_duration="1ep")
    assert rates == pytest.approx([1.0, 1.0, 0.75, 0.5])
    assert last == pytest.approx(0.25)


def test_a_torch_scheduler_steps_every_epoch(run, make_loader):
    rates, _ = run(
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        train_dataloader=make_loader(8, 4),
        max_duration="3ep",
    )
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_a_torch_scheduler_steps_every_batch_when_asked(run):
    rates, _ = run(
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        max_duration="1ep",
        step_schedulers_every_batch=True,
    )
    assert rates == pytest.approx([1, 0.1, 0.01, 0.001])


def test_the_scale_schedule_ratio_stretches_duration_and_schedule(run):
    rates, _ = run(lambda optimizer: LinearScheduler(), max_duration="2ep", scale_schedule_ratio=0.5)
    assert rates == pytest.approx([1.0, 1.0, 0.75, 0.5])


def test_several_composer_schedulers_multiply(run):
    rates, _ = run(lambda optimizer: [LinearScheduler(), lambda state: 0.5], max_duration="1ep")
    assert rates == pytest.approx([0.5, 0.5, 0.375, 0.25])


def test_schedulers_that_would_undo_each_other_are_refused(run):
    def both(optimizer):
        return [torch.optim.lr_scheduler.StepLR(optimizer, 1), LinearScheduler()]

    with pytest.raises(ValueError, match=r"mixes PyTorch's StepLR with LinearScheduler"):
        run(both, max_duration="1ep")
