"""PyTorch's schedulers and Composer's in one list: the learning rate is the product of both, however they step."""

import copy
import math

import pytest
import torch
from torch.optim import lr_scheduler

from composer_optim import (
    ConstantScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    compile_composer_scheduler,
    compile_composer_schedulers,
)

NUM_EPOCHS, NUM_BATCHES = 6, 3

THEIRS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 4]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS, eta_min=0.01),
    # It comes to 0 in the middle and rises again.
    "a whole cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS // 2),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=3.0, total_steps=NUM_EPOCHS + 1),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.5, max_lr=2.0, step_size_up=2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=4),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    ),
}


def make_optimizer(capturable=False):
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": torch.tensor(8.0) if capturable else 8.0}]
    return torch.optim.SGD(groups, lr=torch.tensor(2.0) if capturable else 2.0, momentum=0.9)


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def step(schedulers):
    for scheduler in schedulers:
        scheduler.step()


class Run:
    """A loop that steps Composer's schedulers after every batch and PyTorch's after every epoch."""

    def __init__(self, training, schedulers, optimizer):
        self.state = training(f"{NUM_EPOCHS}ep", batches_per_epoch=NUM_BATCHES)
        self.state.optimizers.append(optimizer)
        self.optimizer = optimizer
        self.schedulers = compile_composer_schedulers(schedulers, self.state)
        self.theirs = [scheduler for scheduler in schedulers if isinstance(scheduler, lr_scheduler.LRScheduler)]
        self.ours = [scheduler for scheduler in self.schedulers if scheduler not in self.theirs]

    def advance(self):
        """Train one batch."""
        self.optimizer.step()
        self.state.timestamp = self.state.timestamp.to_next_batch()

    def train(self, num_epochs):
        """Return the rates of both groups at each batch."""
        rates = []
        for _ in range(num_epochs):
            for _ in range(NUM_BATCHES):
                rates.append(rates_of(self.optimizer))
                self.advance()
                step(self.ours)
            self.state.timestamp = self.state.timestamp.to_next_epoch()
            step(self.theirs)
        return rates


def rates_alone(make_scheduler):
    """Return the rates of both groups in each epoch, with PyTorch's scheduler and nothing beside it."""
    optimizer = make_optimizer()
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(NUM_EPOCHS):
        rates.append(rates_of(optimizer))
        optimizer.step()
        scheduler.step()
    return rates


def linear(batch):
    return 1 - batch / (NUM_EPOCHS * NUM_BATCHES)


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("is_first", [True, False])
def test_the_rate_is_that_of_pytorchs_scheduler_times_composers_factor(training, kind, is_first):
    optimizer = make_optimizer()
    theirs = THEIRS[kind](optimizer)
    schedulers = [theirs, LinearScheduler()] if is_first else [LinearScheduler(), theirs]
    rates = Run(training, schedulers, optimizer).train(NUM_EPOCHS)
    alone = rates_alone(THEIRS[kind])
    for batch, groups in enumerate(rates):
        expected = [rate * linear(batch) for rate in alone[batch // NUM_BATCHES]]
        assert groups == pytest.approx(expected, rel=1e-12, abs=1e-12)  # some roundings on either side


def test_closed_formulas_multiply(training):
    optimizer = make_optimizer()
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS)
    steps = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    schedulers = [cosine, LinearScheduler(), steps, ConstantScheduler(0.25)]
    for batch, groups in enumerate(Run(training, schedulers, optimizer).train(NUM_EPOCHS)):
        epoch = batch // NUM_BATCHES
        factor = (1 + math.cos(math.pi * epoch / NUM_EPOCHS)) / 2 * 0.5 ** (epoch // 2) * linear(batch) * 0.25
        assert groups == pytest.approx([2 * factor, 8 * factor], rel=1e-12)


def test_a_factor_of_zero_loses_nothing(training):
    optimizer = make_optimizer()
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.5), LinearWithWarmupScheduler("3ba", t_max="1dur")]
    rates = [first for first, _ in Run(training, schedulers, optimizer).train(2)]
    end = NUM_EPOCHS * NUM_BATCHES
    second_epoch = [1 - (batch - 3) / (end - 3) for batch in (3, 4, 5)]
    assert rates == pytest.approx([0, 2 / 3, 4 / 3, *second_epoch], rel=1e-12)


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_all_may_step_after_every_batch_in_any_order(training, kind, order):
    optimizer = make_optimizer()
    run = Run(training, [THEIRS[kind](optimizer), LinearScheduler(), ConstantScheduler(0.5)], optimizer)
    rates = [rates_of(optimizer)]
    for _ in range(NUM_EPOCHS - 1):
        run.advance()
        step(run.schedulers[place] for place in order)
        rates.append(rates_of(optimizer))
    for batch, (groups, alone) in enumerate(zip(rates, rates_alone(THEIRS[kind]), strict=True)):
        assert groups == pytest.approx([rate * linear(batch) * 0.5 for rate in alone], rel=1e-12, abs=1e-12)


def test_a_scheduler_may_be_stepped_by_whoever_made_it(training):
    optimizer = make_optimizer()
    halving = lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = Run(training, [halving, LinearScheduler()], optimizer)
    assert run.schedulers[0] is halving
    run.advance()
    halving.step()
    assert rates_of(optimizer) == [1.0, 4.0]  # Composer's factor is still that of the first batch
    step(run.ours)
    assert rates_of(optimizer) == pytest.approx([linear(1), 4 * linear(1)])


def test_a_scheduler_beside_composers_keeps_its_class_and_the_layout_of_its_state(training):
    optimizer = make_optimizer()
    theirs, alone = lr_scheduler.StepLR(optimizer, 2), lr_scheduler.StepLR(make_optimizer(), 2)
    Run(training, [theirs, LinearScheduler()], optimizer)
    assert isinstance(theirs, lr_scheduler.StepLR)
    assert (type(theirs).__qualname__, type(theirs).__module__) == ("StepLR", lr_scheduler.StepLR.__module__)
    assert theirs.state_dict() == alone.state_dict()


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step..` has been overridden")  # PyTorch copies it so
def test_a_copy_of_the_schedulers_and_their_optimizer_leaves_the_original_alone(training):
    optimizer = make_optimizer()
    halving = lr_scheduler.ExponentialLR(optimizer, 0.5)
    Run(training, [halving, ConstantScheduler(0.5)], optimizer)
    copied, of_copied = copy.deepcopy((halving, optimizer))
    of_copied.step()
    copied.step()
    optimizer.step()
    halving.step()
    assert rates_of(of_copied) == rates_of(optimizer) == [0.5, 2.0]


def test_a_group_that_came_later_is_named(training):
    optimizer = make_optimizer()
    halving = lr_scheduler.ExponentialLR(optimizer, 0.5)
    Run(training, [halving, LinearScheduler()], optimizer)
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    with pytest.raises(RuntimeError, match="has 3 parameter groups, and it had 2 when its schedulers were compiled"):
        halving.step()


def test_every_scheduler_says_what_it_made_of_the_rate(training):
    optimizer = make_optimizer()
    run = Run(training, [lr_scheduler.StepLR(optimizer, 1, gamma=0.5), LinearScheduler()], optimizer)
    run.train(1)
    assert run.schedulers[0].get_last_lr() == [1.0, 4.0]
    step(run.ours)
    assert run.schedulers[1].get_last_lr() == rates_of(optimizer) == pytest.approx([linear(3), 4 * linear(3)])


@pytest.mark.parametrize("kind", sorted(THEIRS.keys() - {"LambdaLR"}))  # whose function PyTorch does not save
def test_a_run_resumes_with_the_very_same_rates(training, kind):
    optimizer = make_optimizer()
    whole = Run(training, [THEIRS[kind](optimizer), LinearScheduler()], optimizer)
    whole.train(3)
    saved = copy.deepcopy(([scheduler.state_dict() for scheduler in whole.schedulers], optimizer.state_dict()))

    optimizer = make_optimizer()
    resumed = Run(training, [THEIRS[kind](optimizer), LinearScheduler()], optimizer)
    optimizer.load_state_dict(saved[1])
    for scheduler, state in zip(resumed.schedulers, saved[0], strict=True):
        scheduler.load_state_dict(state)
    resumed.state.timestamp = whole.state.timestamp
    assert resumed.train(3) == whole.train(3)


def test_the_state_of_a_composer_scheduler_stays_plain(training, tmp_path):
    optimizer = make_optimizer()
    run = Run(training, [lr_scheduler.ExponentialLR(optimizer, 0.5), LinearScheduler()], optimizer)
    torch.save(run.schedulers[1].state_dict(), tmp_path / "scheduler.pt")
    saved = torch.load(tmp_path / "scheduler.pt", weights_only=True)
    assert saved["lr_lambdas"] == [{"initial_lr": lr, "rate": lr, "factor": 1.0} for lr in (2.0, 8.0)]


def test_a_run_resumes_between_the_last_batch_and_the_end_of_the_epoch(training):
    def start():
        optimizer = make_optimizer()
        return Run(training, [lr_scheduler.ExponentialLR(optimizer, 0.5), LinearScheduler()], optimizer)

    whole, resumed = start(), start()
    for _ in range(NUM_BATCHES):
        whole.advance()
        step(whole.ours)
    resumed.optimizer.load_state_dict(whole.optimizer.state_dict())
    resumed.optimizer.step()
    for old, new in zip(whole.schedulers, resumed.schedulers, strict=True):
        new.load_state_dict(old.state_dict())
    for run in (whole, resumed):
        step(run.theirs)
    assert rates_of(resumed.optimizer) == rates_of(whole.optimizer) == pytest.approx([linear(3), 4 * linear(3)])


def test_the_order_of_making_them_does_not_matter(training):
    optimizer = make_optimizer()
    steps = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    halving = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=100)
    Run(training, [halving, steps, LinearScheduler()], optimizer)
    assert rates_of(optimizer) == [1.0, 4.0]


def test_schedulers_that_have_been_side_by_side_can_be_so_again(training):
    optimizer = make_optimizer()
    steps = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    Run(training, [steps, ConstantScheduler(0.25, t_max="1dur")], optimizer).train(1)
    Run(training, [steps, ConstantScheduler(0.125, t_max="1dur")], optimizer)
    assert rates_of(optimizer) == [2 * 0.5 * 0.125, 8 * 0.5 * 0.125]


def test_a_rate_that_is_a_tensor_stays_that_tensor(training):
    optimizer = make_optimizer(capturable=True)
    tensors = [group["lr"] for group in optimizer.param_groups]
    run = Run(training, [lr_scheduler.ExponentialLR(optimizer, 0.5), LinearScheduler()], optimizer)
    run.train(1)
    assert [group["lr"] for group in optimizer.param_groups] == tensors
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True))
    assert rates_of(optimizer) == pytest.approx([linear(3), 4 * linear(3)], rel=1e-6)  # float32


def test_a_group_that_began_at_zero_stays_there(training):
    optimizer = make_optimizer()
    optimizer.param_groups[1]["lr"] = 0.0
    run = Run(training, [lr_scheduler.ExponentialLR(optimizer, 0.5), LinearScheduler()], optimizer)
    run.train(1)
    assert rates_of(optimizer)[1] == 0


def test_the_ratio_scales_both_kinds(training):
    optimizer = make_optimizer()
    steps = lr_scheduler.StepLR(optimizer, 4)
    state = training("3ep", batches_per_epoch=NUM_BATCHES)
    state.optimizers.append(optimizer)
    compile_composer_schedulers([steps, LinearScheduler()], state, 0.5)
    assert steps.step_size == 2


def test_pytorchs_alone_are_left_as_they_are(training):
    optimizer = make_optimizer()
    halving = lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert Run(training, [halving], optimizer).schedulers == [halving]
    assert type(halving) is lr_scheduler.ExponentialLR


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda optimizer: lr_scheduler.LinearLR(optimizer), "cannot be applied to a LinearLR"),
        (lambda optimizer: LinearWithWarmupScheduler("1ba", t_max="1ba"), "must be greater than or equal to max_dur"),
        (lambda optimizer: lambda state: 1.0, "takes the state and nothing else"),
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 1), "shorter than one step"),
    ],
)
def test_a_list_that_is_refused_is_left_as_it_was(training, broken, message):
    optimizer = make_optimizer()
    schedulers = [lr_scheduler.StepLR(optimizer, 4), LinearScheduler(), broken(optimizer)]
    rates = rates_of(optimizer)
    state = training("8ba")
    state.optimizers.append(optimizer)
    with pytest.raises(ValueError, match=message):
        compile_composer_schedulers(schedulers, state, 0.5)
    assert (schedulers[0].step_size, type(schedulers[0])) == (4, lr_scheduler.StepLR)
    assert rates_of(optimizer) == rates


@pytest.mark.parametrize("is_first", [True, False])
def test_a_scheduler_compiled_alone_is_refused_beside_another(training, is_first):
    optimizer = make_optimizer()
    state = training("8ba")
    state.optimizers.append(optimizer)
    alone = compile_composer_scheduler(LinearScheduler(), state)
    halving = lr_scheduler.ExponentialLR(optimizer, 0.5)
    state.schedulers = [alone, halving] if is_first else [halving, alone]
    state.timestamp = state.timestamp.to_next_batch()
    optimizer.step()
    with pytest.raises(ValueError, match="has a ExponentialLR and a Composer scheduler that was compiled without"):
        step(state.schedulers)
    with pytest.raises(ValueError, match="LambdaLR in it that compile_composer_scheduler made"):
        compile_composer_schedulers([alone, LinearScheduler()], state)


def test_schedulers_of_other_optimizers_may_stand_in_the_same_list(training):
    optimizer = make_optimizer()
    state = training("8ba")
    state.optimizers.append(optimizer)
    other = lr_scheduler.ExponentialLR(make_optimizer(), 0.5)
    state.schedulers = [compile_composer_scheduler(ConstantScheduler(0.5), state), other]
    optimizer.step()
    state.schedulers[0].step()
    assert rates_of(optimizer) == [1.0, 4.0]


def test_a_scheduler_for_another_optimizer_is_refused(training):
    theirs = lr_scheduler.StepLR(make_optimizer(), 1)
    with pytest.raises(ValueError, match="StepLR in it that was made for another optimizer"):
        Run(training, [theirs, LinearScheduler()], make_optimizer())


def test_a_scheduler_that_waits_for_a_loss_is_refused(training):
    optimizer = make_optimizer()
    with pytest.raises(ValueError, match="ReduceLROnPlateau in it that needs a loss"):
        Run(training, [lr_scheduler.ReduceLROnPlateau(optimizer), LinearScheduler()], optimizer)
