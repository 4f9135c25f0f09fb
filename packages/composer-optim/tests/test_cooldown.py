import math

import pytest

from composer_optim import InversePowerWithWarmupScheduler, WarmupStableDecayScheduler, lr_lambda

# The factors by the completed fraction of the decay, written from the papers.
DECAYS = {
    "linear": lambda x, low: (1 - x) + low * x,
    "cosine": lambda x, low: low + (1 - low) * math.cos(math.pi * x / 2) ** 2,
    "1-sqrt": lambda x, low: low + (1 - low) * (1 - x**0.5),
    "exponential": lambda x, low: math.exp(x * math.log(low)),
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    ("warmup", "length"),
    [("10ba", "40ba"), ("0.1dur", "0.4dur"), ("1ep", "4ep"), ("80sp", "320sp"), ("80tok", "320tok")],
)
def test_warmup_stable_decay_follows_the_formula_in_every_unit(decay, warmup, length):
    unit = warmup[-3:].lstrip("0")
    duration = {"0sp": "800sp", "sp": "800sp", "tok": "800tok"}.get(unit, "10ep")
    factor = lr_lambda(
        WarmupStableDecayScheduler(warmup, length, decay, alpha_f=0.1),
        max_duration=duration,
        batches_per_epoch=10,
        samples_per_batch=8,
        tokens_per_batch=8,
    )
    for batch in range(101):
        expected = min(1.0, batch / 10) * DECAYS[decay](max(0.0, (batch - 60) / 40), 0.1)
        assert factor(batch) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("power", [0.5, 0.51, 0.0])
def test_the_inverse_power_falls_from_the_end_of_the_warmup(power):
    factor = lr_lambda(InversePowerWithWarmupScheduler("10ba", power), max_duration="90ba")
    for batch in range(1, 91):
        # eq. (3) of Vaswani et al., relative to its peak
        expected = min(batch**-power, batch * 10 ** (-power - 1)) / 10**-power
        assert factor(batch) == pytest.approx(expected, rel=1e-12)


def test_the_power_schedule_with_an_exponential_decay():
    lr, a, batch_size, b = 0.02, 4.0, 8, -0.51
    t_flat = round((lr / (a * batch_size)) ** (1 / b))  # tokens
    scheduler = InversePowerWithWarmupScheduler(
        "1000tok", 0.51, f"{t_flat}tok", t_decay="0.2dur", decay="exponential", alpha_f=0.05
    )
    factor = lr_lambda(scheduler, max_duration="10000000tok", tokens_per_batch=1000)
    for batch in range(1, 10_001, 7):
        power_lr = min(lr, a * batch_size * min(batch * 1000, 8_000_000) ** b)
        expected = power_lr * 0.05 ** max(0.0, (batch - 8000) / 2000)
        assert lr * factor(batch) == pytest.approx(expected, rel=1e-5)  # t_flat is rounded


@pytest.mark.parametrize(
    "scheduler",
    [WarmupStableDecayScheduler("10ba", "20ba"), InversePowerWithWarmupScheduler("10ba", t_decay="20ba")],
)
def test_a_longer_training_only_delays_the_decay(scheduler):
    short, long = (lr_lambda(scheduler, max_duration=duration) for duration in ("60ba", "90ba"))
    assert [short(batch) for batch in range(41)] == [long(batch) for batch in range(41)]
    assert short(60) == long(90) == 0.0
    assert short(41) < long(41)


def test_the_ratio_scales_the_decay_with_the_training():
    scheduler = WarmupStableDecayScheduler("10ba", "40ba", "linear")
    half = lr_lambda(scheduler, max_duration="200ba", scale_schedule_ratio=0.5)
    assert [half(batch) for batch in (5, 80, 90, 100)] == [0.5, 1.0, 0.5, 0.0]


def test_a_training_too_short_for_both_has_no_jump():
    factor = lr_lambda(WarmupStableDecayScheduler("10ba", "10ba", "linear"), max_duration="10ba")
    assert [factor(batch) for batch in range(11)] == pytest.approx([t / 10 * (1 - t / 10) for t in range(11)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmupStableDecayScheduler("1ba", decay="sqrt"), "decay='sqrt' must be one of 'linear', 'cosine'"),
        (lambda: WarmupStableDecayScheduler("1ba", decay="exponential"), r"alpha_f=0\.0 must be more than 0"),
        (lambda: WarmupStableDecayScheduler("1ba", "-1ba"), "t_decay='-1ba' is not a length"),
        (lambda: WarmupStableDecayScheduler("1ba", alpha_f=math.nan), "alpha_f=nan must be finite"),
        (lambda: InversePowerWithWarmupScheduler("1ba", -0.5), r"power=-0\.5 must be 0 or more"),
        (lambda: InversePowerWithWarmupScheduler("0ba"), "t_flat='0ba' is not a length"),
        (
            lambda: lr_lambda(WarmupStableDecayScheduler("0.1dur", "5ba"), max_duration="80tok", tokens_per_batch=8)(0),
            "t_decay comes to '5ba' and t_max is counted in 'tok'",
        ),
    ],
)
def test_an_invalid_argument_is_an_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()
