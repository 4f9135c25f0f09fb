"""The learning rate each batch sees."""

import copy

import pytest
import torch

from composer.core import Callback, State
from composer.optim import LinearScheduler, compile_composer_scheduler


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
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert last == pytest.approx(0.0)


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
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_several_composer_schedulers_multiply(run):
    rates, _ = run(lambda optimizer: [LinearScheduler(), lambda state: 0.5], max_duration="1ep")
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


def side_by_side(optimizer):
    return [torch.optim.lr_scheduler.StepLR(optimizer, 1), LinearScheduler()]


@pytest.mark.parametrize("every_batch", [None, True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_side_by_side_all_step_every_epoch_unless_asked_otherwise(run, make_loader, every_batch, order):
    rates, last = run(
        lambda optimizer: side_by_side(optimizer)[::order],
        train_dataloader=make_loader(8, 4),
        max_duration="3ep",
        step_schedulers_every_batch=every_batch,
    )
    if every_batch:
        expected = [0.1**batch * (1 - batch / 6) for batch in range(7)]
    else:
        expected = [0.1 ** (batch // 2) * (1 - batch // 2 * 2 / 6) for batch in range(7)]
    assert [*rates, last] == pytest.approx(expected, rel=1e-12, abs=1e-15)


class AddToTheSchedulers(Callback):
    def __init__(self, event, make_scheduler):
        setattr(self, event, lambda state, logger: state.schedulers.append(make_scheduler(state)))


@pytest.mark.parametrize(("event", "num_batches"), [("after_load", 0), ("batch_start", 1)])
def test_a_scheduler_added_beside_one_that_was_compiled_without_it_is_refused(
    make_trainer, make_model, make_loader, event, num_batches
):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    add = AddToTheSchedulers(event, lambda state: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    rates = Rates()
    trainer = make_trainer(
        model=model,
        optimizers=optimizer,
        schedulers=LinearScheduler(),
        callbacks=[add, rates],
        train_dataloader=make_loader(8, 4),
        max_duration="1ep",
        step_schedulers_every_batch=True,
    )
    with pytest.raises(ValueError, match="has a ExponentialLR and a Composer scheduler that was compiled without"):
        trainer.fit()
    assert len(rates.rates) == num_batches


@pytest.fixture
def compiled():
    """Compile for a state of its own, as nobody has the trainer's before there is a trainer."""

    def make(optimizer):
        state = State(None, 0, max_duration="3ep", dataloader=[1, 2], optimizers=optimizer, device="cpu")
        return compile_composer_scheduler(LinearScheduler(), state)

    return make


def test_a_scheduler_that_asks_another_clock_is_refused(run, compiled):
    with pytest.raises(ValueError, match="LambdaLR that was compiled for another State than the trainer's"):
        run(compiled, max_duration="3ep")


@pytest.mark.parametrize(
    "other", [lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), lambda optimizer: LinearScheduler()]
)
def test_a_scheduler_compiled_alone_is_refused_in_a_list(run, compiled, other):
    with pytest.raises(ValueError, match="Give the Trainer the schedulers themselves, uncompiled"):
        run(lambda optimizer: [compiled(optimizer), other(optimizer)], max_duration="3ep")


def test_one_compiled_for_the_trainers_state_may_be_given_to_fit(make_trainer, make_model, make_loader):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates = Rates()
    settings = {"train_dataloader": make_loader(16, 4), "max_duration": "1ep", "callbacks": rates}
    trainer = make_trainer(model=model, optimizers=optimizer, **settings)
    trainer.fit(schedulers=compile_composer_scheduler(LinearScheduler(), trainer.state))
    assert rates.rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_schedulers_that_cannot_be_scaled_leave_the_others_as_they_were(run):
    schedulers = []

    def make(optimizer):
        kinds = torch.optim.lr_scheduler
        schedulers.extend([kinds.StepLR(optimizer, 4), kinds.LinearLR(optimizer)])
        return schedulers

    with pytest.raises(ValueError, match="cannot be applied to a LinearLR"):
        run(make, max_duration="4ep", scale_schedule_ratio=0.5)
    assert schedulers[0].step_size == 4


@pytest.mark.parametrize("ratio", ["0.5", float("nan"), float("inf"), 0])
def test_a_ratio_that_is_none_is_named(run, ratio):
    with pytest.raises((TypeError, ValueError), match="scale_schedule_ratio="):
        run(lambda optimizer: LinearScheduler(), max_duration="1ep", scale_schedule_ratio=ratio)


class SaveAfterTwoEpochs(Callback):
    def epoch_checkpoint(self, state, logger):
        if state.timestamp.epoch == 2:
            self.saved = copy.deepcopy(state.state_dict())


def test_a_second_run_from_zero_begins_with_the_first_rate(make_trainer, make_model, make_loader):
    model, rates = make_model(), Rates()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"optimizers": optimizer, "train_dataloader": make_loader(16, 4), "max_duration": "1ep"}
    trainer = make_trainer(model=model, schedulers=LinearScheduler(), callbacks=rates, **settings)
    trainer.fit(reset_time=True)  # of which there is nothing to reset yet
    trainer.fit(reset_time=True)
    assert rates.rates == [1.0, 0.75, 0.5, 0.25] * 2


def test_a_second_run_from_zero_lets_pytorchs_schedulers_go_on(make_trainer, make_model, make_loader):
    model, rates = make_model(), Rates()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    settings = {"optimizers": optimizer, "train_dataloader": make_loader(8, 4), "max_duration": "1ep"}
    trainer = make_trainer(model=model, schedulers=scheduler, callbacks=rates, **settings)
    trainer.fit()
    trainer.fit(reset_time=True)
    assert rates.rates == [1.0, 1.0, 0.5, 0.5]


def test_a_fit_without_time_left_leaves_the_rate_as_it_was(make_trainer, make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make_trainer(model=model, optimizers=optimizer, max_duration="1ep")
    trainer.fit()
    with pytest.raises(ValueError, match="Please provide the `duration`"):
        trainer.fit(schedulers=LinearScheduler(alpha_i=0.01))
    assert optimizer.param_groups[0]["lr"] == 1.0


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
