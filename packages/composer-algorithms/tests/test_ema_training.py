"""Training with `EMA`: the same weights whatever is evaluated, saved or interrupted on the way."""

import io

import pytest
import torch

from composer_algorithms import EMA
from composer_events import Event

SETTINGS = [
    pytest.param({"half_life": "4ba"}, id="batches"),
    pytest.param({"half_life": "1ep"}, id="epochs"),
    pytest.param({"half_life": None, "smoothing": 0.5, "update_interval": "3ba", "ema_start": "0.4dur"}, id="late"),
]


def average_of(loop):
    [ema] = loop.algorithms
    return {**ema.ema_model.named_parameters_dict, **ema.ema_model.named_buffers_dict}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("iteration_length", [None, "2ep"])
@pytest.mark.parametrize("save_interval", ["1ba", "3ba", "1ep", "1iter", "0.5dur"])
def test_results_do_not_depend_on_the_save_interval(make_loop, make_saver, settings, iteration_length, save_interval):
    plain = make_loop([EMA(**settings)], iteration_length=iteration_length, max_duration="4ep").fit()
    saver = make_saver(save_interval)
    saving = make_loop([EMA(**settings)], [saver], iteration_length=iteration_length, max_duration="4ep").fit()
    assert saver.checkpoints
    torch.testing.assert_close(saving.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(average_of(saving), average_of(plain), rtol=0, atol=0)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("num_evaluators", [1, 2])
def test_results_do_not_depend_on_evaluation(make_loop, settings, num_evaluators):
    plain = make_loop([EMA(**settings)]).fit()
    evaluated = make_loop([EMA(**settings)], evaluate=lambda state: True, num_evaluators=num_evaluators).fit()
    torch.testing.assert_close(evaluated.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(average_of(evaluated), average_of(plain), rtol=0, atol=0)


def test_training_itself_is_that_without_an_average(make_loop, make_saver):
    without = make_loop([]).fit()
    with_average = make_loop([EMA("2ba")], [make_saver("1ba")], evaluate=lambda state: True).fit()
    torch.testing.assert_close(with_average.model.state_dict(), without.model.state_dict(), rtol=0, atol=0)


def test_the_average_is_the_recurrence_over_the_weights_of_each_batch(make_loop, make_saver, recorder):
    loop = make_loop([EMA("4ba", update_interval="2ba")], [make_saver("1ba"), recorder]).fit()
    weights = recorder.on(Event.BATCH_END)
    smoothing, expected = 2**-0.5, weights[0]
    for weight in weights[1::2]:
        expected = smoothing * expected + (1 - smoothing) * weight
    torch.testing.assert_close(average_of(loop)["first.weight"], expected)


def test_only_evaluation_and_checkpoints_see_the_average(make_loop, make_saver, recorder):
    make_loop([EMA("4ba")], [make_saver("1ba"), recorder], evaluate=lambda state: True, iteration_length="1ep").fit()
    see_average = {Event.EVAL_BEFORE_ALL, Event.EVAL_START, Event.EVAL_END, Event.BATCH_CHECKPOINT}
    num_batches = 0
    for event, weight in recorder.seen:
        if event is Event.BATCH_END:
            num_batches, trained = num_batches + 1, weight
        elif num_batches > 1:  # after the first batch the two sets are equal
            assert torch.equal(weight, trained) == (event not in see_average), event


@pytest.mark.parametrize("settings", SETTINGS)
def test_training_resumed_from_any_checkpoint_ends_with_the_same_weights(make_loop, make_saver, settings):
    saver = make_saver("1ba")
    whole = make_loop([EMA(**settings)], [saver]).fit()
    for checkpoint in saver.checkpoints[2:-1:3]:
        resumed = make_loop([EMA(**settings)]).resume_from(checkpoint).fit()
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(average_of(resumed), average_of(whole), rtol=0, atol=0)


def test_a_saved_checkpoint_has_the_average_as_the_model(make_loop, make_saver):
    saver = make_saver("1ep")
    loop = make_loop([EMA("4ba")], [saver]).fit()
    saved = torch.load(io.BytesIO(saver.checkpoints[-1]), weights_only=True)
    torch.testing.assert_close(saved["model"]["last.bias"], average_of(loop)["last.bias"], rtol=0, atol=0)
    state_of_ema = saved["algorithms"][0]
    assert state_of_ema["ema_weights_active"]
    held = state_of_ema["ema_model"]["named_parameters_dict"]["last.bias"]
    torch.testing.assert_close(held, loop.model.last.bias.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("microbatch_size", [4, 2])
def test_microbatches_lead_to_the_same_average_as_the_whole_batch(make_loop, make_model, microbatch_size):
    whole, cut = (
        average_of(make_loop([EMA("4ba")], model=make_model(norm=False), microbatch_size=size).fit())
        for size in (8, microbatch_size)
    )
    # 12 steps of float32 sums in another order
    torch.testing.assert_close(whole, cut, atol=1e-5, rtol=1e-4)
