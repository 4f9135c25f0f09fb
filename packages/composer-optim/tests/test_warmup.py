import logging
import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from composer_optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialWithWarmupScheduler,
    compile_composer_scheduler,
)

# `training` only makes new objects, so one fixture can serve all examples.
law = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

# 1 000 batches an epoch; (scheduler, ratio, batch, factor), each worked out by hand
STEPS = MultiStepWithWarmupScheduler("10ba", ["2ep", "4ep"], 0.5, scale_warmup=True)
FIXED_STEPS = MultiStepWithWarmupScheduler("10ba", ["2ep", "4ep"], 0.5)
LINE = LinearWithWarmupScheduler("500ep", 3, 2, "1002ep")
VALUES = [
    (STEPS, 0.5, 0, 0.0),
    (STEPS, 0.5, 5, 1.0),
    (STEPS, 0.5, 15, 1.0),
    (STEPS, 0.5, 1_500, 0.5),
    (STEPS, 0.5, 2_500, 0.25),
    (FIXED_STEPS, 0.5, 5, 0.5),
    (FIXED_STEPS, 0.5, 1_500, 0.5),
    (LINE, 0.5, 0, 0.0),
    (LINE, 0.5, 250_000, 1.5),
    (LINE, 0.5, 500_000, 3.0),
    (LINE, 0.5, 500_500, 2.5),
    (LINE, 0.5, 501_000, 2.0),
    (LINE, 0.5, 502_000, 2.0),
    (ConstantWithWarmupScheduler("500ep", 0.5), 1.0, 250_000, 0.25),
    (ConstantWithWarmupScheduler("500ep", 0.5), 1.0, 500_000, 0.5),
    (ConstantWithWarmupScheduler("500ep", 0.5), 1.0, 2_000_000, 0.5),
    (CosineAnnealingWithWarmupScheduler("0.1dur", alpha_f=0.2), 1.0, 25_000, 0.25),
    (CosineAnnealingWithWarmupScheduler("0.1dur", alpha_f=0.2), 1.0, 100_000, 1.0),
    (CosineAnnealingWithWarmupScheduler("0.1dur", alpha_f=0.2), 1.0, 400_000, 0.2 + 0.8 * 0.75),
    (CosineAnnealingWithWarmupScheduler("0.1dur", alpha_f=0.2), 1.0, 550_000, 0.6),
    (CosineAnnealingWithWarmupScheduler("0.1dur", alpha_f=0.2), 1.0, 1_000_000, 0.2),
    (PolynomialWithWarmupScheduler("100ep", alpha_f=0.2), 1.0, 50_000, 0.5),
    (PolynomialWithWarmupScheduler("100ep", alpha_f=0.2), 1.0, 550_000, 0.4),
    (PolynomialWithWarmupScheduler("100ep", power=3.0), 1.0, 550_000, 0.125),
]


@pytest.mark.parametrize(("scheduler", "ssr", "batch", "expected"), VALUES)
def test_the_factor_follows_the_formula(training, scheduler, ssr, batch, expected):
    # The duration that goes with the ratio is already scaled.
    state = training(f"{int(1000 * ssr)}ep", batch=batch)
    assert scheduler(state, ssr) == pytest.approx(expected, rel=1e-12)


SHAPES = [
    ConstantWithWarmupScheduler,
    LinearWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    PolynomialWithWarmupScheduler,
]
warmups = st.integers(1, 999)


@law
@pytest.mark.parametrize("shape", SHAPES)
@given(t_warmup=warmups)
def test_the_ramp_meets_the_shape_without_a_jump(training, shape, t_warmup):
    scheduler = shape(f"{t_warmup}ba")
    before, at = (scheduler(training("1000ba", batch=batch)) for batch in (t_warmup - 1, t_warmup))
    assert at == pytest.approx(1.0)
    assert at - before == pytest.approx(1 / t_warmup)


@law
@pytest.mark.parametrize("shape", SHAPES)
@given(t_warmup=warmups, batch=st.integers(0, 1500))
def test_the_factor_stays_between_zero_and_its_peak(training, shape, t_warmup, batch):
    assert -1e-12 <= shape(f"{t_warmup}ba")(training("1000ba", batch=batch)) <= 1.0 + 1e-12


@law
@given(t_warmup=warmups, batch=st.integers(0, 1500))
def test_after_the_warmup_the_steps_are_those_of_the_plain_scheduler(training, t_warmup, batch):
    milestones = ["300ba", "0.7dur"]
    state = training("1000ba", batch=t_warmup + batch)
    warm = MultiStepWithWarmupScheduler(f"{t_warmup}ba", milestones)(state)
    assert warm == MultiStepScheduler(milestones)(state)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ratio_leaves_the_warmup_alone_unless_told_otherwise(training, shape):
    state = training("500ba", batch=50)
    assert shape("100ba", t_max="1000ba")(state, 0.5) == pytest.approx(0.5)
    assert shape("100ba", t_max="1000ba", scale_warmup=True)(state, 0.5) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_after_a_shortened_ramp_the_factor_waits_for_the_shape(training, shape):
    scheduler = shape("100ba", t_max="1000ba", scale_warmup=True)
    assert [scheduler(training("500ba", batch=batch), 0.5) for batch in (50, 75, 100)] == [1.0, 1.0, 1.0]


def test_a_warmup_as_long_as_the_training_leaves_no_way_for_the_shape(training):
    scheduler = CosineAnnealingWithWarmupScheduler("10ba", "10ba")
    assert [scheduler(training("10ba", batch=batch)) for batch in (5, 10, 11)] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("make", [*SHAPES, lambda t_warmup: MultiStepWithWarmupScheduler(t_warmup, ["5ba"])])
def test_a_warmup_of_nothing_warns_at_each_call(training, make):
    scheduler = make("0.001dur")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"t_warmup='0\.001dur' comes to '0ba'"):
            assert scheduler(training("10ba")) == 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_warmup_in_another_unit_than_the_shape_is_refused(training, shape):
    with pytest.raises(ValueError, match="Cannot use warmup scheduler"):
        shape("100tok", t_max="10ep")(training("10ep"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("t_max", "max_duration"), [("9ep", "10ep"), ("9999ba", "10ep"), ("9ba", "10ba")])
def test_a_shape_that_ends_before_training_is_refused(training, shape, t_max, max_duration):
    with pytest.raises(ValueError, match="must be greater than or equal to max_duration"):
        shape("1ba", t_max=t_max)(training(max_duration))


def test_the_steps_may_end_whenever_they_like(training):
    assert MultiStepWithWarmupScheduler("100tok", ["1ep"])(training("10ep", token=50)) == 0.5


def test_lengths_that_cannot_be_compared_are_only_noted(training, caplog):
    with caplog.at_level(logging.DEBUG, "composer.optim.scheduler"):
        assert LinearWithWarmupScheduler("2tok", t_max="4tok")(training("10ep", token=3)) == 0.5
    assert "cannot be compared" in caplog.text


@law
@given(epochs=st.integers(1, 200), batches=st.integers(1, 1000), percent=st.integers(1, 200))
def test_a_shape_as_long_as_the_training_fits_it_under_every_ratio(training, epochs, batches, percent):
    ssr = percent / 100
    assume(int(epochs * ssr) > 0)
    state = training(f"{int(epochs * ssr)}ep", batches_per_epoch=batches)
    assert LinearWithWarmupScheduler("1ba", t_max=f"{epochs}ep")(state, ssr) == 0.0


def test_a_length_that_rounding_made_one_batch_short_is_accepted(training):
    # int(0.35 * 100) epochs of 7 batches are 245 batches, but int(100 * 7 * 0.35) is 244.
    assert (int(0.35 * 100) * 7, int(100 * 7 * 0.35)) == (245, 244)
    state = training("35ep", batches_per_epoch=7, batch=1)
    assert CosineAnnealingWithWarmupScheduler("1ba", t_max="100ep")(state, 0.35) == 1.0


def test_the_cosine_begins_where_the_warmup_ends(training):
    scheduler = CosineAnnealingWithWarmupScheduler("20ba")
    expected = (1 + math.cos(math.pi * (35 - 20) / (100 - 20))) / 2
    assert scheduler(training("100ba", batch=35)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda t_warmup: MultiStepWithWarmupScheduler(t_warmup, ["5ba"]),
        ConstantWithWarmupScheduler,
        LinearWithWarmupScheduler,
        CosineAnnealingWithWarmupScheduler,
        PolynomialWithWarmupScheduler,
    ],
)
def test_a_warmup_of_less_than_nothing_is_refused(make):
    with pytest.raises(ValueError, match=r"t_warmup='-1ba' is not a length.*0 or more"):
        make("-1ba")


def test_a_shape_needs_time_and_a_power():
    with pytest.raises(ValueError, match=r"t_max='0ba' is not a length.*more than 0"):
        LinearWithWarmupScheduler("1ba", t_max="0ba")
    with pytest.raises(ValueError, match="power=-1 must be 0 or more"):
        PolynomialWithWarmupScheduler("1ba", power=-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda flag: MultiStepWithWarmupScheduler("1ep", ["2ep"], scale_warmup=flag),
        lambda flag: ConstantWithWarmupScheduler("1ep", scale_warmup=flag),
        lambda flag: CosineAnnealingWithWarmupScheduler("1ep", scale_warmup=flag),
    ],
)
def test_a_text_is_no_answer_to_whether_the_ramp_is_scaled(make):
    with pytest.raises(TypeError, match="scale_warmup='False' is neither True nor False"):
        make("False")


@pytest.mark.parametrize(
    ("t_warmup", "duration"), [("2001ba", "2ep"), ("3ep", "2ep"), ("1.5dur", "100sp"), ("9sp", "8sp")]
)
def test_a_warmup_longer_than_training_warns_when_it_is_compiled(training, t_warmup, duration):
    state = training(duration)
    state.optimizers = [torch.optim.SGD([torch.zeros(1)], lr=1.0)]
    with pytest.warns(UserWarning, match=rf"t_warmup='{t_warmup}' is longer than training, max_duration='{duration}'"):
        compile_composer_scheduler(MultiStepWithWarmupScheduler(t_warmup, []), state)


@pytest.mark.parametrize(("t_warmup", "duration"), [("2000ba", "2ep"), ("1dur", "8sp"), ("9sp", "8ba")])
def test_a_warmup_that_is_not_longer_or_cannot_be_compared_does_not_warn(training, t_warmup, duration):
    state = training(duration)
    state.optimizers = [torch.optim.SGD([torch.zeros(1)], lr=1.0)]
    compile_composer_scheduler(MultiStepWithWarmupScheduler(t_warmup, []), state)  # warnings are errors
