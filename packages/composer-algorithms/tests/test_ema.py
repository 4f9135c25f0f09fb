"""What `EMA` accepts, what it does on each event, and what it saves."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_algorithms import EMA
from composer_algorithms.ema import EMAParameters, post_hoc_ema
from composer_events import Event
from composer_time import Time, Timestamp


# Below 2**-1000 nothing is left of a number to take a root of.
@given(half_life=st.integers(5, 5000), interval=st.integers(1, 5000), unit=st.sampled_from(["ba", "ep"]))
def test_after_a_half_life_of_updates_half_is_forgotten(half_life, interval, unit):
    ema = EMA(half_life=f"{half_life}{unit}", update_interval=f"{interval}{unit}")
    assert ema.smoothing == pytest.approx(2 ** (-interval / half_life))
    assert ema.smoothing ** (half_life / interval) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "smoothing", "interval"),
    [
        ({}, 2 ** (-1 / 1000), Time(1, "ba")),
        ({"half_life": "4ep"}, 2 ** (-1 / 4), Time(1, "ep")),
        ({"half_life": Time(10, "ba"), "update_interval": "5ba"}, 2**-0.5, Time(5, "ba")),
        ({"half_life": None, "smoothing": 0.9}, 0.9, Time(1, "ba")),
        ({"half_life": None, "smoothing": 1}, 1.0, Time(1, "ba")),
        ({"half_life": None, "smoothing": 0, "update_interval": "2ep"}, 0.0, Time(2, "ep")),
    ],
)
def test_smoothing_and_interval_follow_from_either_argument(arguments, smoothing, interval):
    ema = EMA(**arguments)
    assert ema.smoothing == pytest.approx(smoothing)
    assert isinstance(ema.smoothing, float)
    assert ema.update_interval == interval


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"power": 3.0, "half_life": "10ba"}, "power=3.0 must be used without half_life"),
        ({"power": (1.0, 2.0, 3.0)}, "must be one number or two"),
        ({"power": ()}, "must be one number or two"),
        ({"power": (1.0, -2.0)}, r"power=-2\.0"),
        ({"half_life": None}, "exactly one of the two"),
        ({"smoothing": 0.9}, "exactly one of the two"),
        ({"half_life": None, "smoothing": 1.5}, "smoothing=1.5"),
        ({"update_interval": 1}, "update_interval=1 has no unit"),
        ({"update_interval": 0}, "update_interval=0 has no unit"),
        ({"update_interval": "1ep"}, "different units"),
        ({"half_life": "10sp"}, "half_life='10sp'"),
        ({"half_life": "0ba"}, "half_life='0ba'"),
        ({"half_life": None, "smoothing": 0.9, "update_interval": "0.1dur"}, "update_interval='0.1dur'"),
        ({"ema_start": "10tok"}, "ema_start='10tok'"),
        ({"ema_start": 3}, "ema_start=3 has no unit"),
        ({"train_with_ema_weights": True}, "train_with_ema_weights=True"),
    ],
)
def test_settings_that_mean_nothing_are_refused_with_their_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        EMA(**arguments)


def test_train_with_ema_weights_false_is_accepted_as_an_old_spelling():
    with pytest.warns(DeprecationWarning, match="leave it out") as caught:
        EMA(train_with_ema_weights=False)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "ema",
    [
        EMA(),
        EMA("2ep", ema_start="0.5dur", update_interval="1ep"),
        EMA(None, 0.75, "3ba", "2ba", warmup=True),
        EMA(power=3),
        EMA(power=(16.97, 6.94)),
    ],
    ids=repr,
)
def test_the_repr_builds_an_equal_one(ema):
    again = eval(repr(ema))
    assert (again.smoothing, again.update_interval, again.ema_start, again.warmup, again.power) == (
        ema.smoothing,
        ema.update_interval,
        ema.ema_start,
        ema.warmup,
        ema.power,
    )


def move_weights(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def act(ema, state, *events):
    for event in events:
        if ema.match(event, state):
            ema.apply(event, state, None)


@pytest.fixture
def started(state):
    """An average that is 1 everywhere of a model that is 3 everywhere, after one batch."""
    ema = EMA(half_life=None, smoothing=0.5)
    move_weights(state.model, 1.0)
    state.timestamp = Timestamp(batch=1)
    act(ema, state, Event.INIT, Event.BATCH_END)
    move_weights(state.model, 3.0)
    return ema


def weight(state):
    return state.model.last.bias[0].item()


@pytest.mark.parametrize(
    ("ema_start", "timestamp", "is_reached"),
    [
        ("0.0dur", Timestamp(batch=1), True),
        ("0.5dur", Timestamp(batch=40), False),
        ("0.5dur", Timestamp(batch=40, epoch=1), True),
        ("30ba", Timestamp(batch=29), False),
        ("30ba", Timestamp(batch=30), True),
        ("1ep", Timestamp(batch=99), False),
        ("1ep", Timestamp(batch=100, epoch=1), True),
    ],
)
def test_it_starts_as_a_copy_once_the_start_is_reached(state, ema_start, timestamp, is_reached):
    ema = EMA(ema_start=ema_start)
    act(ema, state, Event.INIT)
    move_weights(state.model, 7.0)
    state.timestamp = timestamp
    act(ema, state, Event.BATCH_END)
    assert ema.ema_started == is_reached
    assert (ema.ema_model.named_parameters_dict["last.bias"][0].item() == 7.0) == is_reached


def test_a_start_that_needs_a_length_of_training_says_so_where_there_is_none(state):
    state.max_duration = None
    assert EMA().match(Event.BATCH_END, state)
    with pytest.raises(RuntimeError, match=r"ema_start='0\.5dur'"):
        EMA(ema_start="0.5dur").match(Event.BATCH_END, state)


def test_matching_alone_changes_nothing(state):
    ema = EMA()
    act(ema, state, Event.INIT)
    average = ema.ema_model
    for event in Event:
        ema.match(event, state)
    assert not ema.ema_started
    assert ema.ema_model is average


def test_events_before_the_start_are_not_matched(state):
    ema = EMA(ema_start="100ba")
    assert [event for event in Event if ema.match(event, state)] == [Event.INIT]


@pytest.mark.parametrize(("unit", "event"), [("ba", Event.BATCH_END), ("ep", Event.EPOCH_END)])
def test_updates_come_at_multiples_of_the_interval(state, unit, event):
    ema = EMA(half_life=None, smoothing=0.5, update_interval=f"3{unit}")
    counter = {"ba": "batch", "ep": "epoch"}[unit]
    move_weights(state.model, 0.0)
    averages = []
    act(ema, state, Event.INIT)
    for count in range(1, 8):
        state.timestamp = Timestamp(**{counter: count})
        act(ema, state, event)
        averages.append(ema.ema_model.named_parameters_dict["last.bias"][0].item())
        move_weights(state.model, 8.0)
    # It starts at count 1 with 0 and is updated at 3 and 6.
    assert averages == [0, 0, 4, 4, 4, 6, 6]


def test_a_driver_that_only_applies_gets_an_update_of_the_copy_taken_on_init(state):
    ema = EMA(half_life=None, smoothing=0.5)
    move_weights(state.model, 1.0)
    ema.apply(Event.INIT, state, None)
    move_weights(state.model, 3.0)
    ema.apply(Event.BATCH_END, state, None)
    assert ema.ema_model.named_parameters_dict["last.bias"][0].item() == 2.0
    ema.apply(Event.EVAL_START, state, None)
    assert weight(state) == 2.0
    ema.apply(Event.EVAL_END, state, None)
    assert weight(state) == 3.0


def test_warmup_forgets_the_beginning_quickly(state):
    ema = EMA(half_life=None, smoothing=0.9, warmup=True)
    move_weights(state.model, 0.0)
    state.timestamp = Timestamp(batch=1)
    act(ema, state, Event.INIT, Event.BATCH_END)
    move_weights(state.model, 1.0)
    expected = 0.0
    for update in range(200):
        act(ema, state, Event.BATCH_END)
        smoothing = min(0.9, (1 + update) / (10 + update))
        expected = smoothing * expected + (1 - smoothing)
        # float32 against double, errors of 200 steps
        assert ema.ema_model.named_parameters_dict["last.bias"][0].item() == pytest.approx(expected, abs=1e-5)


def test_with_a_power_weights_count_by_a_power_of_their_time_also_in_a_resumed_run(state):
    power, num_updates = 6.94, 400
    ema = EMA(half_life=None, power=power)
    state.timestamp = Timestamp(batch=1)
    act(ema, state, Event.INIT, Event.BATCH_END)
    for update in range(1, num_updates + 1):
        if update == num_updates // 2:
            saved, ema = ema.state_dict(), EMA(half_life=None, power=power)
            act(ema, state, Event.INIT)
            ema.load_state_dict(saved)
        move_weights(state.model, update / num_updates)
        act(ema, state, Event.BATCH_END)
    found = ema.ema_model.named_parameters_dict["last.bias"][0].item()
    # The integral of x * (power + 1) * x^power from 0 to 1, which steps of 1 / num_updates approximate.
    assert found == pytest.approx((power + 1) / (power + 2), abs=1 / num_updates)
    exact, kept = 0.0, 1.0
    for update in range(num_updates, 0, -1):
        smoothing = (1 - 1 / update) ** (power + 1)
        exact, kept = exact + kept * (1 - smoothing) * update / num_updates, kept * smoothing
    assert found == pytest.approx(exact, abs=1e-5)  # float32 against double, errors of 400 steps


def test_any_width_is_reconstructed_from_snapshots_of_two_averages_also_of_a_resumed_run(state):
    powers, other, num_updates, generator = (16.97, 6.94), 9.0, 256, torch.Generator().manual_seed(0)
    state.model.double()
    two, direct, snapshots, walk = EMA(power=powers), EMA(power=other), [], torch.zeros(3, dtype=torch.float64)
    state.timestamp = Timestamp(batch=1)
    for ema in (two, direct):
        act(ema, state, Event.INIT, Event.BATCH_END)
    for update in range(1, num_updates + 1):
        if update == num_updates // 2:
            saved, two = two.state_dict(), EMA(power=powers)
            act(two, state, Event.INIT)
            two.load_state_dict(saved)
        walk = walk + torch.randn(3, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            state.model.last.bias.copy_(walk)
        for ema in (two, direct):
            act(ema, state, Event.BATCH_END)
        if update % 16 == 0:
            snapshots += two.snapshots()
    expected = direct.snapshots()[0][2]["last.bias"]
    for snapshot, power in zip(snapshots[-2:], powers, strict=True):
        assert snapshot[:2] == (num_updates, power)
        far = (snapshot[2]["last.bias"] - expected).norm()
    found = post_hoc_ema(snapshots, other)["last.bias"]
    # The combined weights of the steps are within 0.3% of those of the average, by the sum of squares.
    assert (found - expected).norm() < 0.01 * far
    torch.testing.assert_close(post_hoc_ema(snapshots, powers[1])["last.bias"], snapshots[-1][2]["last.bias"])
    with pytest.raises(ValueError, match=r"num_updates=300 must be from 16 to 256"):
        post_hoc_ema(snapshots, other, 300)
    with pytest.raises(ValueError, match=r"num_updates=15 must be from 16 to 256"):
        post_hoc_ema(snapshots, other, 15)
    with pytest.raises(ValueError, match="one average, and power"):
        EMA(power=powers).load_state_dict(direct.state_dict())


@pytest.mark.parametrize("power", [0.0, 1.0, 4.0, 10.0, 25.0, 50.0])
@pytest.mark.parametrize("times", [(100,), (2, 4, 6), range(10, 101, 10)])
@pytest.mark.parametrize("powers", [(16.97, 6.94), (16.97,)])
def test_constant_weights_stay_constant_for_every_power_and_time(power, times, powers):
    snapshots = [(time, each, {"weight": torch.ones(2, dtype=torch.float64)}) for time in times for each in powers]
    for num_updates in (None, times[0], (times[0] + times[-1]) // 2):
        found = post_hoc_ema(snapshots, power, num_updates)["weight"]
        torch.testing.assert_close(found, torch.ones(2, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("power", "error"), [(0.0, 0.15), (1.0, 0.04), (4.0, 4e-3), (10.0, 1e-3), (25.0, 4e-3), (50.0, 0.015)]
)
def test_few_snapshots_reconstruct_the_average_that_is_computed_directly(power, error):
    """Weights of 1 + 1 / t at time t. Without the division by the sum, the errors are 0.65, 0.3, 0.07, 0.02, ...."""

    def average(num_updates, power):
        found = 0.0
        for time in range(1, num_updates + 1):
            smoothing = (1 - 1 / time) ** (power + 1)
            found = smoothing * found + (1 - smoothing) * (1 + 1 / time)
        return torch.tensor(found, dtype=torch.float64)

    snapshots = [(time, each, {"weight": average(time, each)}) for time in (2, 4, 6) for each in (16.97, 6.94)]
    assert abs(post_hoc_ema(snapshots, power)["weight"] - average(6, power)) < error


def test_evaluation_sees_the_average_and_training_its_own_weights(state, started):
    act(started, state, Event.EVAL_START)
    assert weight(state) == 1.0
    assert started.ema_weights_active
    act(started, state, Event.EVAL_END)
    assert weight(state) == 3.0


@pytest.mark.parametrize(
    ("begin", "end"),
    [(Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL), (Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END)],
)
def test_several_evaluators_share_one_exchange(state, started, begin, end):
    seen = []
    for event in (begin, Event.EVAL_START, Event.EVAL_END, Event.EVAL_START, Event.EVAL_END, end):
        act(started, state, event)
        seen.append(weight(state))
    assert seen == [1.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    act(started, state, Event.EVAL_START, Event.EVAL_END)
    assert weight(state) == 3.0


@pytest.mark.parametrize(
    "event",
    [
        Event.ITERATION_START,
        Event.EPOCH_START,
        Event.BATCH_START,
        Event.BATCH_END,
        Event.EPOCH_END,
        Event.ITERATION_END,
        Event.FIT_END,
    ],
)
def test_every_event_of_training_puts_the_trained_weights_back(state, started, event):
    act(started, state, Event.EVAL_BEFORE_ALL, Event.EVAL_START)  # an evaluation that breaks off
    assert weight(state) == 1.0
    act(started, state, event)
    assert weight(state) == 3.0
    act(started, state, Event.EVAL_START, Event.EVAL_END)
    assert weight(state) == 3.0


@pytest.mark.parametrize("event", [Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT])
@pytest.mark.parametrize("is_due", [True, False])
def test_a_checkpoint_that_is_due_gets_the_average(state, started, make_saver, event, is_due):
    saver = make_saver("1ba")
    asked = []
    saver.save_interval = lambda state, event: asked.append(event) or is_due
    state.callbacks.append(saver)
    act(started, state, event)
    assert asked == [event]
    assert (weight(state) == 1.0) == is_due


def test_before_a_batch_is_fetched_the_trained_weights_are_back(state, started, make_saver):
    # Algorithms may run the model on the batch as soon as it is there.
    state.callbacks.append(make_saver("1ba"))
    started.apply(Event.BATCH_CHECKPOINT, state, None)
    act(started, state, Event.BEFORE_DATALOADER)
    assert weight(state) == 3.0


def test_while_the_model_holds_the_trained_weights_events_of_training_are_not_matched(state, started):
    concerned = [event for event in Event if started.match(event, state)]
    assert Event.BATCH_START not in concerned
    assert Event.EVAL_START in concerned


def test_prediction_leaves_the_model_with_what_it_holds(state, started):
    act(started, state, Event.PREDICT_START, Event.PREDICT_END)
    assert weight(state) == 3.0
    act(started, state, Event.EVAL_START, Event.PREDICT_START)
    assert weight(state) == 1.0


def test_each_set_of_weights_is_handed_out_while_the_model_holds_the_other(state, started, make_model):
    assert started.get_ema_model(make_model(norm=False)).last.bias[0].item() == 1.0
    with pytest.raises(ValueError, match="ema_weights_active=False"):
        started.get_training_model(make_model(norm=False))
    act(started, state, Event.EVAL_START)
    assert started.get_training_model(make_model(norm=False)).last.bias[0].item() == 3.0
    with pytest.raises(ValueError, match="ema_weights_active=True"):
        started.get_ema_model(make_model(norm=False))
    with pytest.raises(ValueError, match="no average yet"):
        EMA().get_ema_model(make_model(norm=False))


def test_before_the_average_begins_there_is_none_to_hand_out(state, make_model):
    ema = EMA(ema_start="2ba")
    state.timestamp = Timestamp(batch=1)
    act(ema, state, Event.INIT, Event.BATCH_END)
    other = make_model(norm=False)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"no average yet .*ema_started=False"):
        ema.get_ema_model(other)
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    state.timestamp = Timestamp(batch=2)
    act(ema, state, Event.BATCH_END)
    torch.testing.assert_close(ema.get_ema_model(other).state_dict(), state.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("leave_active", [True, False])
def test_a_second_run_begins_anew(state, make_model, leave_active):
    ema = EMA(half_life=None, smoothing=0.5, ema_start="3ba", warmup=True)
    state.timestamp = Timestamp(batch=3)
    act(ema, state, Event.INIT, Event.BATCH_END, Event.BATCH_END)
    assert ema.ema_started
    assert ema.num_updates == 1
    if leave_active:
        act(ema, state, Event.EVAL_START)  # which breaks off

    state.model, state.timestamp = make_model(norm=False), Timestamp(batch=1)
    move_weights(state.model, 5.0)
    act(ema, state, Event.INIT, Event.BATCH_END, Event.EVAL_START)
    assert weight(state) == 5.0
    assert (ema.ema_started, ema.ema_weights_active, ema.num_updates) == (False, False, 0)

    state.timestamp = Timestamp(batch=3)
    act(ema, state, Event.BATCH_END)
    assert (ema.ema_started, ema.num_updates) == (True, 0)
    assert ema.ema_model.named_parameters_dict["last.bias"][0].item() == 5.0


def test_a_start_that_was_matched_but_not_applied_is_forgotten_by_the_next_run(state):
    ema = EMA(half_life=None, smoothing=0.5)
    act(ema, state, Event.INIT)
    assert ema.match(Event.BATCH_END, state)
    move_weights(state.model, 1.0)
    ema.apply(Event.INIT, state, None)
    move_weights(state.model, 3.0)
    ema.apply(Event.BATCH_END, state, None)  # an update of the copy taken on INIT, not the copy itself
    assert ema.ema_model.named_parameters_dict["last.bias"][0].item() == 2.0


def test_the_state_has_the_documented_keys(state, started):
    saved = started.state_dict()
    assert saved["format"] == 2
    assert saved["repr"] == repr(started)
    assert saved["ema_started"] is True
    assert saved["ema_weights_active"] is False
    assert list(saved["ema_model"]) == ["named_parameters_dict", "named_buffers_dict"]
    assert set(saved["ema_model"]["named_parameters_dict"]) == set(dict(state.model.named_parameters()))


def reloaded(state, saved, **arguments):
    ema = EMA(half_life=None, smoothing=0.5)
    ema.apply(Event.INIT, state, None)
    ema.load_state_dict(saved, **arguments)
    return ema


def assert_same_state(one, other):
    torch.testing.assert_close(one["ema_model"], other["ema_model"], rtol=0, atol=0)
    assert {**one, "ema_model": None} == {**other, "ema_model": None}


@pytest.mark.parametrize("average_active", [True, False])
def test_saving_and_loading_is_the_identity(state, started, average_active):
    if average_active:
        act(started, state, Event.EVAL_START)
    saved = copy.deepcopy(started.state_dict())
    ema = reloaded(state, saved)
    assert_same_state(ema.state_dict(), saved)
    act(ema, state, Event.EVAL_START)
    assert weight(state) == 1.0
    act(ema, state, Event.BATCH_START)
    assert weight(state) == 3.0


@pytest.mark.parametrize("average_active", [True, False])
def test_a_state_loaded_before_init_is_kept(state, started, average_active):
    if average_active:
        act(started, state, Event.EVAL_START)
    saved = copy.deepcopy(started.state_dict())
    ema = EMA(half_life=None, smoothing=0.5)
    ema.load_state_dict(saved)
    ema.load_state_dict(saved)  # a second time, as who is not sure does
    ema.apply(Event.INIT, state, None)
    assert_same_state(ema.state_dict(), saved)
    ema.apply(Event.INIT, state, None)  # of another run
    assert not ema.ema_started


def test_a_state_of_another_model_loaded_before_init_is_refused_on_init(state, started):
    ema = EMA()
    ema.load_state_dict(renamed(started.state_dict(), lambda name: "other." + name))
    with pytest.raises(ValueError, match="4 are missing"):
        ema.apply(Event.INIT, state, None)


def test_what_was_loaded_does_not_change_with_the_average(state, started):
    saved = started.state_dict()
    before = copy.deepcopy(saved)
    ema = reloaded(state, saved)
    act(ema, state, Event.BATCH_END)
    assert_same_state(saved, before)


def test_a_state_saved_before_the_start_loads(state):
    ema = reloaded(state, EMA().state_dict())
    assert not ema.ema_started
    assert set(ema.ema_model.named_parameters_dict) == set(dict(state.model.named_parameters()))


def renamed(saved, rename):
    average = {kind: {rename(n): t for n, t in tensors.items()} for kind, tensors in saved["ema_model"].items()}
    return {**saved, "ema_model": average}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_a_wrapped_model_in_composers_own_states_are_understood(state, started, prefix):
    saved = renamed(started.state_dict(), lambda name: prefix + name)
    del saved["format"], saved["num_updates"]
    ema = reloaded(state, saved, strict=True)
    torch.testing.assert_close(ema.ema_model.named_parameters_dict, started.ema_model.named_parameters_dict)


def test_a_state_of_another_model_is_refused(state, started):
    saved = renamed(started.state_dict(), lambda name: "other." + name)
    with pytest.raises(ValueError, match="4 are missing"):
        reloaded(state, saved)


def test_missing_names_are_logged_and_taken_from_the_model_unless_strict(state, started, caplog):
    saved = copy.deepcopy(started.state_dict())
    del saved["ema_model"]["named_parameters_dict"]["last.bias"]
    ema = reloaded(state, saved)
    assert "1 are missing (such as ['last.bias'])" in caplog.text
    assert caplog.records[0].name == "composer.algorithms.ema"
    assert ema.ema_model.named_parameters_dict["last.bias"][0].item() == 3.0
    assert ema.ema_model.named_parameters_dict["last.weight"][0, 0].item() == 1.0
    with pytest.raises(ValueError, match=r"last\.bias"):
        reloaded(state, saved, strict=True)


def test_a_state_of_a_newer_format_is_refused(state, started):
    with pytest.raises(ValueError, match=r"format 3.*reads up to 2"):
        reloaded(state, {**started.state_dict(), "format": 3})


@pytest.mark.parametrize(("average_active", "held"), [(True, 9.0), (False, 4.0)])
def test_a_state_from_before_composer_0_13_loads(state, average_active, held):
    weights = state.model.state_dict()
    saved = {
        "ema_model": {name: torch.full_like(tensor, 4.0) for name, tensor in weights.items()},
        "training_model": {name: torch.full_like(tensor, 9.0) for name, tensor in weights.items()},
        "ema_weights_active": average_active,
        "ema_started": True,
    }
    ema = reloaded(state, saved)
    assert ema.ema_weights_active == average_active
    assert {tensor.unique().item() for _, tensor in ema.ema_model.named_parameters()} == {held}
    with pytest.raises(RuntimeError, match=r"Event\.INIT"):
        EMA().load_state_dict(saved)


def test_warmup_is_over_for_a_state_that_does_not_count_updates(state, started):
    saved = started.state_dict()
    del saved["num_updates"]
    ema = EMA(half_life=None, smoothing=0.5, warmup=True)
    ema.apply(Event.INIT, state, None)
    ema.load_state_dict(saved)
    ema.apply(Event.BATCH_END, state, None)
    assert ema.ema_model.named_parameters_dict["last.bias"][0].item() == pytest.approx(2.0)


@pytest.mark.parametrize("event", [Event.FIT_START, Event.PREDICT_START, Event.EVAL_START])
def test_the_average_follows_the_model_to_its_device(state, started, event):
    state.model.to("meta")  # a device that every machine has
    started.apply(event, state, None)
    assert {tensor.device.type for _, tensor in started.ema_model.named_parameters()} == {"meta"}


def test_without_init_the_set_of_weights_is_taken_when_it_is_needed(state):
    ema = EMA(half_life=None, smoothing=0.5)
    ema.apply(Event.EVAL_START, state, None)
    assert isinstance(ema.ema_model, EMAParameters)
