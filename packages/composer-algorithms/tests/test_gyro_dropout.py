"""Which masks there are, which are in use, and for how long."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer_algorithms import GyroDropout
from composer_algorithms.functional import apply_gyro_dropout
from composer_algorithms.gyro_dropout import GyroDropoutLayer
from composer_events import Event, NoEffectWarning, State


def layer(p=0.5, sigma=8, tau=4, iters=100, epochs=2):
    torch.manual_seed(0)
    return GyroDropoutLayer(iters, epochs, p, sigma, tau)


def rows(mask):
    return {tuple(row) for row in mask.flatten(1).tolist()}


@pytest.mark.parametrize(("p", "sigma", "tau"), [(0.5, 256, 16), (0.2, 8, 2), (0.7, 4, 4)])
def test_the_output_is_the_masked_and_scaled_input_in_blocks_of_the_batch(p, sigma, tau):
    one, x = layer(p, sigma, tau), torch.randn(16, 10)
    y = one(x)
    mask = one.dropout_mask
    assert torch.equal(y, x * mask * (1 / (1 - p)))
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    for block in mask.split(16 // tau):
        assert (block == block[0]).all()


def test_features_are_dropped_as_often_as_asked():
    one = layer(p=0.3, sigma=400, tau=100)
    one(torch.ones(100, 50))
    # The mean over 400 masks of 50 features, of which 100 were chosen: a deviation of about 0.0065.
    assert one.dropout_mask.mean().item() == pytest.approx(0.7, abs=0.03)


def test_masks_are_chosen_anew_after_the_steps_that_the_paper_says_and_come_from_a_fixed_set():
    one, seen, masks = layer(sigma=8, tau=2, iters=40, epochs=1), [], set()
    for _ in range(60):
        one(torch.ones(4, 12))
        seen.append(one.dropout_mask.clone())
        masks |= rows(one.dropout_mask)
    period = 40 // 8 * 2
    for start in range(0, 60, period):
        assert all(torch.equal(seen[start], mask) for mask in seen[start : start + period])
    assert len(rows(torch.stack([mask.flatten() for mask in seen[::period]]))) > 1
    assert len(masks) <= 8


@given(batch_size=st.integers(0, 20), tau=st.integers(1, 9), sigma=st.integers(1, 30), steps=st.integers(0, 5))
def test_any_batch_size_and_any_accepted_setting_work(batch_size, tau, sigma, steps):
    one = layer(sigma=sigma, tau=tau, iters=steps, epochs=1)
    y = one(torch.ones(batch_size, 3, 5))
    assert y.shape == (batch_size, 3, 5)
    assert len(rows(one.dropout_mask)) <= min(tau, batch_size)


def test_the_last_dim_is_that_of_the_features():
    one = layer()
    y = one(torch.ones(4, 7, 6))
    assert (y == y[:, :1]).all()


def test_a_vector_is_one_example():
    module = layer(sigma=8, tau=4)
    output = module(torch.ones(32))
    assert output.shape == (32,)
    assert set(output.tolist()) == {0.0, 2.0}


def test_evaluation_changes_nothing():
    x = torch.rand(4, 6)
    assert layer().eval()(x) is x


def test_the_same_seed_gives_the_same_masks():
    x = torch.ones(8, 20)
    assert torch.equal(layer()(x), layer()(x))


def test_dropout_is_replaced_once():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.2)))
    apply_gyro_dropout(model, 10, 2, p=0.5, sigma=4, tau=2)
    kept = [model[1], model[2][0]]
    apply_gyro_dropout(model, 10, 2, p=0.5, sigma=4, tau=2)
    assert [model[1], model[2][0]] == kept
    assert all(isinstance(one, GyroDropoutLayer) and one.p == 0.5 for one in kept)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def test_a_model_without_dropout_is_warned_about():
    with pytest.warns(NoEffectWarning, match="GyroDropout has no effect on this Linear") as caught:
        apply_gyro_dropout(nn.Linear(1, 1), 1, 1, 0.5, 1, 1)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p": 1.0}, r"p=1\.0 is not in \[0, 1\)"),
        ({"p": -0.1}, r"p=-0\.1"),
        ({"sigma": 0}, "sigma=0"),
        ({"tau": 0}, "tau=0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GyroDropout(**settings)
    with pytest.raises(ValueError, match=message):
        layer(**settings)


@pytest.mark.parametrize(
    ("iters", "epochs", "error", "message"),
    [
        (-1, 2, ValueError, r"iters_per_epoch=-1 is not in \[0, inf"),
        (10, float("nan"), ValueError, r"max_epoch=nan is not in \[0, inf"),
        ("10", 2, TypeError, "iters_per_epoch='10' is not a number"),
    ],
)
def test_a_length_of_training_that_is_none_is_refused(iters, epochs, error, message):
    with pytest.raises(error, match=message):
        apply_gyro_dropout(nn.Sequential(nn.Dropout()), iters, epochs, p=0.5, sigma=8, tau=4)


class Run:
    """A run whose batches are cut into microbatches."""

    def __init__(self, max_duration="12ba", seed=3):
        self.algorithm = GyroDropout(p=0.5, sigma=4, tau=2)
        model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        self.state = State(model, rank_zero_seed=seed, max_duration=max_duration, dataloader=range(6))
        for event in (Event.INIT, Event.FIT_START):
            self.algorithm.apply(event, self.state, None)

    def step(self, num_microbatches=2):
        self.algorithm.apply(Event.BATCH_START, self.state, None)
        return [self.state.model(torch.ones(4, 16)) for _ in range(num_microbatches)]


@pytest.mark.parametrize("max_duration", ["12ba", "2ep"])
def test_microbatches_share_their_masks_and_the_schedule_counts_batches(max_duration):
    run = Run(max_duration)
    batches = [run.step() for _ in range(12)]
    assert all(torch.equal(first, second) for first, second in batches)
    period = 12 // 4 * 2
    assert all(torch.equal(batches[0][0], batch[0]) for batch in batches[:period])
    assert any(not torch.equal(batches[0][0], batch[0]) for batch in batches[period:])
    first, second = run.state.model
    assert not torch.equal(first.dropout_mask, second.dropout_mask)


def test_a_resumed_run_has_the_masks_that_it_would_have_had():
    run = Run()
    expected = [run.step(1)[0] for _ in range(12)]
    first, second = Run(), Run()
    for _ in range(5):
        first.step(1)
    second.algorithm.load_state_dict(first.algorithm.state_dict())
    assert all(torch.equal(second.step(1)[0], one) for one in expected[5:])
    assert any(not torch.equal(Run(seed=4).step(1)[0], one) for one in expected)


def test_a_run_that_was_made_longer_is_resumed_exactly():
    whole, resumed = Run("6ba"), Run("6ba")
    for _ in range(6):
        whole.step(1)
    resumed.algorithm.load_state_dict(whole.algorithm.state_dict())
    for run in (whole, resumed):
        run.state.max_duration = "60ba"
        run.algorithm.apply(Event.FIT_START, run.state, None)
    assert all(torch.equal(whole.step(1)[0], resumed.step(1)[0]) for _ in range(54))


def test_fit_start_alone_is_enough_for_a_bare_state():
    algorithm, model = GyroDropout(), nn.Sequential(nn.Dropout())
    state = State(model, rank_zero_seed=0, max_duration="1ep", dataloader=range(5))
    algorithm.apply(Event.FIT_START, state, None)
    assert isinstance(model[0], GyroDropoutLayer)


def test_an_unknown_number_of_steps_is_refused():
    algorithm = GyroDropout()
    state = State(nn.Sequential(nn.Dropout()), rank_zero_seed=0, max_duration="100tok")
    algorithm.apply(Event.INIT, state, None)
    with pytest.raises(ValueError, match="GyroDropout needs the number of training steps"):
        algorithm.apply(Event.FIT_START, state, None)
