import pytest
import torch
from torch.optim import lr_scheduler

from composer_optim import scale_pytorch_scheduler


@pytest.fixture
def learning_rates():
    """Run `make_scheduler(optimizer)`, scaled by `ssr`, and return the learning rate of each step."""

    def run(make_scheduler, ssr, num_steps):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = make_scheduler(optimizer)
        scale_pytorch_scheduler(scheduler, ssr)
        rates = []
        for _ in range(num_steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return rates

    return run


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 4, gamma=0.5),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [4, 4, 10], gamma=0.5),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4, T_mult=2),
    ],
    ids=["StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"],
)
def test_half_the_schedule_is_every_second_step_of_the_whole(learning_rates, make_scheduler):
    whole, half = learning_rates(make_scheduler, 1.0, 12), learning_rates(make_scheduler, 0.5, 6)
    # CosineAnnealingLR multiplies its way from step to step; twelve roundings stay far below 1e-12.
    assert half == pytest.approx(whole[::2], rel=1e-12, abs=1e-12)


def test_lengths_are_rounded_down(learning_rates):
    rates = learning_rates(lambda optimizer: lr_scheduler.StepLR(optimizer, 5, gamma=0.5), 0.5, 5)
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("ssr", [0.0, -0.5])
def test_a_ratio_that_is_not_positive_is_refused(learning_rates, ssr):
    with pytest.raises(ValueError, match="must be more than 0"):
        learning_rates(lambda optimizer: lr_scheduler.StepLR(optimizer, 5), ssr, 1)


@pytest.mark.parametrize(
    ("make_scheduler", "name"),
    [
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 5), "StepLR.step_size"),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5), "CosineAnnealingLR.T_max"),
        (lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [40, 5]), "MultiStepLR.milestones"),
    ],
)
def test_a_length_that_would_become_nothing_is_refused(learning_rates, make_scheduler, name):
    with pytest.raises(ValueError, match=f"{name}=5 shorter than one step. Use a ratio of more than 1/5"):
        learning_rates(make_scheduler, 0.1, 1)


def test_a_milestone_at_the_very_start_stays_there(learning_rates):
    rates = learning_rates(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [0, 4], gamma=0.5), 0.5, 3)
    assert rates == [0.5, 0.5, 0.25]


def test_a_scheduler_of_another_kind_is_refused_unless_nothing_is_to_be_scaled(learning_rates):
    def make(optimizer):
        return lr_scheduler.LinearLR(optimizer)

    assert learning_rates(make, 1.0, 1) == [pytest.approx(1 / 3)]
    with pytest.raises(ValueError, match="cannot be applied to a LinearLR"):
        learning_rates(make, 0.5, 1)
