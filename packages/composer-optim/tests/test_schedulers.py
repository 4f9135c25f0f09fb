import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_optim import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
)

# `training` only makes new objects, so one fixture can serve all examples.
law = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

# 1 000 epochs of 1 000 batches; (scheduler, batch, factor), each worked out by hand from the formula
VALUES = [
    (StepScheduler("10ba"), 5, 1.0),
    (StepScheduler("10ba"), 10, 0.1),
    (StepScheduler("10ba"), 15, 0.1),
    (StepScheduler("10ba"), 35, 0.001),
    (StepScheduler("2ep", gamma=0.5), 1_999, 1.0),
    (StepScheduler("2ep", gamma=0.5), 4_000, 0.25),
    (MultiStepScheduler(["10ba", "2ep", "0.5dur"]), 9, 1.0),
    (MultiStepScheduler(["10ba", "2ep", "0.5dur"]), 10, 0.1),
    (MultiStepScheduler(["0.5dur", "10ba", "2ep"]), 2_000, 0.01),
    (MultiStepScheduler(["0.5dur", "10ba", "2ep"]), 500_000, 0.001),
    (MultiStepScheduler([]), 500_000, 1.0),
    (ConstantScheduler(), 999_999, 1.0),
    (ConstantScheduler(0.5, "1ep"), 999, 0.5),
    (ConstantScheduler(0.5, "1ep"), 1_000, 1.0),
    (LinearScheduler(), 250_000, 0.75),
    (LinearScheduler(), 2_000_000, 0.0),
    (LinearScheduler(0, 1, "0.25dur"), 100_000, 0.4),
    (LinearScheduler(0, 1, "0.25dur"), 200_000, 0.8),
    (LinearScheduler(0, 1, "0.25dur"), 400_000, 1.0),
    (ExponentialScheduler(0.5), 0, 1.0),
    (ExponentialScheduler(0.5), 1_000, 0.5),
    (ExponentialScheduler(0.5), 500, math.sqrt(0.5)),
    (ExponentialScheduler(0.5, "10ba"), 30, 0.125),
    (CosineAnnealingScheduler(), 0, 1.0),
    (CosineAnnealingScheduler(), 333_333, 0.75),
    (CosineAnnealingScheduler(alpha_f=0.2), 500_000, 0.6),
    (CosineAnnealingScheduler("90ba", alpha_f=0.2), 60, 0.4),
    (CosineAnnealingScheduler("90ba", alpha_f=0.2), 91, 0.2),
    (CosineAnnealingWarmRestartsScheduler("0.003dur", 1.5), 0, 1.0),
    (CosineAnnealingWarmRestartsScheduler("0.003dur", 1.5), 1_000, 0.75),
    (CosineAnnealingWarmRestartsScheduler("0.003dur", 1.5), 3_000, 1.0),
    (CosineAnnealingWarmRestartsScheduler("0.003dur", 1.5), 4_500, 0.75),
    (CosineAnnealingWarmRestartsScheduler("0.003dur", 1.5), 7_500, 1.0),
    (CosineAnnealingWarmRestartsScheduler("0.003dur", 1.5), 14_250, 1.0),
    (CosineAnnealingWarmRestartsScheduler("90ba", alpha_f=0.2), 900_060, 0.4),
    (PolynomialScheduler(2.0), 500_000, 0.25),
    (PolynomialScheduler(3.0, "10ba", alpha_f=0.2), 5, 0.3),
    (PolynomialScheduler(3.0, "10ba", alpha_f=0.2), 11, 0.2),
]


@pytest.mark.parametrize(("scheduler", "batch", "expected"), VALUES)
def test_the_factor_follows_the_formula(training, scheduler, batch, expected):
    # 333 333 is not quite a third of the way: the slope of the cosine there is below 2e-6 per batch.
    assert scheduler(training("1000ep", batch=batch)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("max_duration", ["100sp", "100tok", "100iter"])
def test_a_schedule_counts_in_the_unit_of_the_duration(training, max_duration):
    unit = {"sp": "sample", "tok": "token", "iter": "iteration"}[max_duration.removeprefix("100")]
    assert LinearScheduler()(training(max_duration, batches_per_epoch=None, batch=7, **{unit: 25})) == 0.75


SCALED = [
    StepScheduler("10ep"),
    MultiStepScheduler(["20ba", "10ep"]),
    ConstantScheduler(0.5, "10ep"),
    LinearScheduler(t_max="20ep"),
    LinearScheduler(t_max="0.5dur"),
    ExponentialScheduler(0.5, "4ep"),
    CosineAnnealingScheduler("20ep", alpha_f=0.1),
    CosineAnnealingWarmRestartsScheduler("4ep", 2.0),
    PolynomialScheduler(2.0, "20ep"),
]


@law
@pytest.mark.parametrize("scheduler", SCALED)
@given(half_batch=st.integers(0, 200))
def test_half_the_schedule_is_the_whole_one_at_twice_the_speed(training, scheduler, half_batch):
    half = training("10ep", batches_per_epoch=20, batch=half_batch)
    whole = training("20ep", batches_per_epoch=20, batch=2 * half_batch)
    # Every length above is an even number of batches, so nothing is rounded.
    assert scheduler(half, 0.5) == pytest.approx(scheduler(whole), rel=1e-12)


DECREASING = [
    LinearScheduler(1.0, 0.25, "0.9dur"),
    CosineAnnealingScheduler("0.9dur", alpha_f=0.25),
    PolynomialScheduler(1.5, "0.9dur", alpha_f=0.25),
]


@law
@pytest.mark.parametrize("scheduler", DECREASING)
@given(batch=st.integers(0, 300), later=st.integers(0, 300))
def test_the_factor_only_falls_and_stays_within_its_bounds(training, scheduler, batch, later):
    now, then = (scheduler(training("200ba", batch=at)) for at in (batch, batch + later))
    assert 0.25 - 1e-12 <= then <= now + 1e-12 <= 1.0 + 2e-12


@law
@given(t_0=st.integers(1, 50), t_mult=st.floats(1.0, 3.0), batch=st.integers(0, 500))
def test_warm_restarts_agree_with_walking_through_every_batch(training, t_0, t_mult, batch):
    in_cycle, length = 0, t_0
    for _ in range(batch):
        in_cycle += 1
        if in_cycle == length:
            in_cycle, length = 0, int(length * t_mult)
    expected = (1 + math.cos(math.pi * in_cycle / length)) / 2
    scheduler = CosineAnnealingWarmRestartsScheduler(f"{t_0}ba", t_mult)
    assert scheduler(training("1000ba", batch=batch)) == pytest.approx(expected, abs=1e-12)


def test_a_million_restarts_are_not_walked_through(training):
    class Watched(float):
        num_uses = 0

        def __mul__(self, other):
            Watched.num_uses += 1
            return float(self) * other

    scheduler = CosineAnnealingWarmRestartsScheduler("1ba", Watched(1.5))  # int(1.5 * 1) is 1 for ever
    assert scheduler(training("1000000ba", batch=999_999)) == 1.0
    assert Watched.num_uses == 1


def test_a_cycle_that_shrinks_to_nothing_is_refused_when_it_is_reached(training):
    scheduler = CosineAnnealingWarmRestartsScheduler("2ba", t_mult=0.4)
    assert scheduler(training("10ba", batch=1)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"t_mult=0\.4"):
        scheduler(training("10ba", batch=2))


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [
        (StepScheduler("1ba"), "step_size"),
        (ExponentialScheduler(0.5, "1ba"), "decay_period"),
        (CosineAnnealingWarmRestartsScheduler("1ba"), "t_0"),
    ],
)
def test_a_period_that_is_scaled_to_nothing_is_refused_by_name(training, scheduler, name):
    with pytest.raises(ValueError, match=f"{name}='1ba' comes to '0ba'"):
        scheduler(training("10ba"), 0.5)


@pytest.mark.parametrize(
    "scheduler",
    [LinearScheduler(1.0, 0.5, "1ba"), CosineAnnealingScheduler("1ba", 0.5), PolynomialScheduler(2, "1ba", 0.5)],
)
def test_a_way_that_is_scaled_to_nothing_is_done_at_once(training, scheduler):
    assert scheduler(training("10ba"), 0.5) == 0.5


def test_a_bad_length_is_refused_when_the_scheduler_is_made():
    with pytest.raises(ValueError, match="10 parsecs"):
        StepScheduler("10 parsecs")
    with pytest.raises(TypeError, match="t_max=100 has no unit"):
        LinearScheduler(t_max=100)


def test_a_single_milestone_is_not_taken_for_a_sequence_of_characters():
    with pytest.raises(TypeError, match=r"\['10ep'\]"):
        MultiStepScheduler("10ep")


def test_the_base_class_has_no_schedule_of_its_own(training):
    class Nothing(ComposerScheduler):
        pass

    with pytest.raises(NotImplementedError, match="Nothing does not define"):
        Nothing()(training("1ep"))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda length: StepScheduler(length), "step_size"),
        (lambda length: ConstantScheduler(t_max=length), "t_max"),
        (lambda length: LinearScheduler(t_max=length), "t_max"),
        (lambda length: ExponentialScheduler(0.5, length), "decay_period"),
        (lambda length: CosineAnnealingScheduler(length), "t_max"),
        (lambda length: CosineAnnealingWarmRestartsScheduler(length), "t_0"),
        (lambda length: PolynomialScheduler(2.0, length), "t_max"),
    ],
)
@pytest.mark.parametrize("length", ["-1ba", "0ba", "-0.5dur", "0.0dur"])
def test_a_length_that_is_none_is_refused_where_the_scheduler_is_made(make, name, length):
    with pytest.raises(ValueError, match=f"{name}='{length}' is not a length.*more than 0"):
        make(length)


def test_a_milestone_may_be_the_start_but_not_lie_before_it(training):
    assert MultiStepScheduler(["0ba"], gamma=0.5)(training("10ba")) == 0.5
    with pytest.raises(ValueError, match=r"milestones='-1ba' is not a length.*0 or more"):
        MultiStepScheduler(["5ba", "-1ba"])


@pytest.mark.parametrize(
    ("make", "name", "least"),
    [
        (lambda gamma: StepScheduler("1ep", gamma), "gamma", "0 or more and "),
        (lambda gamma: MultiStepScheduler(["1ep"], gamma), "gamma", "0 or more and "),
        (lambda gamma: MultiStepWithWarmupScheduler("1ep", ["2ep"], gamma), "gamma", "0 or more and "),
        (ExponentialScheduler, "gamma", "0 or more and "),
        (ConstantScheduler, "alpha", ""),
        (LinearScheduler, "alpha_i", ""),
        (lambda alpha_f: LinearScheduler(alpha_f=alpha_f), "alpha_f", ""),
        (lambda alpha_f: CosineAnnealingScheduler(alpha_f=alpha_f), "alpha_f", ""),
        (lambda alpha_f: CosineAnnealingWarmRestartsScheduler("1ep", alpha_f=alpha_f), "alpha_f", ""),
        (lambda t_mult: CosineAnnealingWarmRestartsScheduler("1ep", t_mult), "t_mult", ""),
        (lambda alpha_f: PolynomialScheduler(2, alpha_f=alpha_f), "alpha_f", ""),
        (lambda alpha: ConstantWithWarmupScheduler("1ep", alpha), "alpha", ""),
        (lambda alpha_i: LinearWithWarmupScheduler("1ep", alpha_i), "alpha_i", ""),
        (lambda alpha_f: LinearWithWarmupScheduler("1ep", alpha_f=alpha_f), "alpha_f", ""),
        (lambda alpha_f: CosineAnnealingWithWarmupScheduler("1ep", alpha_f=alpha_f), "alpha_f", ""),
        (lambda alpha_f: PolynomialWithWarmupScheduler("1ep", alpha_f=alpha_f), "alpha_f", ""),
    ],
)
def test_what_a_learning_rate_cannot_be_multiplied_by_is_refused(make, name, least):
    for number in (math.nan, math.inf, -math.inf, *([-0.5] if least else [])):
        with pytest.raises(ValueError, match=f"{name}={number!r} must be {least}finite"):
            make(number)
    with pytest.raises(ValueError, match=f"{name}='a number larger than any float' must be {least}finite"):
        make(10**5000)
    for value in ("0.1", None, True):
        with pytest.raises(TypeError, match=f"{name}={value!r} is not a number"):
            make(value)
    make(0)


@pytest.mark.parametrize(
    ("power", "kind"), [(-1, ValueError), (float("nan"), ValueError), ("2", TypeError), (None, TypeError)]
)
def test_a_power_that_has_no_curve_is_refused(power, kind):
    with pytest.raises(kind, match=f"power={power!r}"):
        PolynomialScheduler(power)
