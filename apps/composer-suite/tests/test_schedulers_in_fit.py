"""The learning rate each batch sees."""

import copy

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


def side_by_side(optimizer):
    return [torch.optim.lr_scheduler.StepLR(optimizer, 1), LinearScheduler()]


def test_side_by_side_composers_step_every_batch_and_torchs_every_epoch(run, make_loader):
    rates, last = run(side_by_side, train_dataloader=make_loader(8, 4), max_duration="3ep")
    # A batch trains with the factor of the batch before it, as schedulers step before the clock moves.
    linear = [1 - max(batch - 1, 0) / 6 for batch in range(7)]
    steps = [0.1 ** (batch // 2) for batch in range(7)]
    assert [*rates, last] == pytest.approx([a * b for a, b in zip(linear, steps, strict=True)], rel=1e-12)


@pytest.mark.parametrize("every_batch", [True, False])
def test_side_by_side_all_step_as_often_as_asked(run, make_loader, every_batch):
    rates, _ = run(
        side_by_side,
        train_dataloader=make_loader(8, 4),
        max_duration="3ep",
        step_schedulers_every_batch=every_batch,
    )
    if every_batch:
        expected = [0.1**batch * (1 - max(batch - 1, 0) / 6) for batch in range(6)]
    else:
        expected = [0.1 ** (batch // 2) * (1 - batch // 2 * 2 / 6) for batch in range(6)]
    assert rates == pytest.approx(expected, rel=1e-12)


class SaveAfterTwoEpochs(Callback):
    def epoch_checkpoint(self, state, logger):
        if state.timestamp.epoch == 2:
            self.saved = copy.deepcopy(state.state_dict())


def test_side_by_side_a_run_resumes_with_the_very_same_rates(make_trainer, make_model, make_loader):
    def start(*callbacks):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return make_trainer(
            model=model,
            optimizers=optimizer,
            schedulers=side_by_side(optimizer),
            callbacks=callbacks,
            train_dataloader=make_loader(8, 4),
            max_duration="4ep",
        )

    whole, resumed, save = Rates(), Rates(), SaveAfterTwoEpochs()
    start(whole, save).fit()
    trainer = start(resumed)
    trainer.state.load_state_dict(save.saved)
    trainer.fit()
    assert resumed.rates == whole.rates[4:]


def test_a_scheduler_that_waits_for_a_loss_is_refused(run):
    with pytest.raises(ValueError, match="ReduceLROnPlateau, whose steps need a loss"):
        run(torch.optim.lr_scheduler.ReduceLROnPlateau, max_duration="1ep")
