import math
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_events import Event, State, create_interval_scheduler, evaluate_periodically
from composer_time import Time, TimeUnit

BATCH_SIZE = 2


def events_of_training(max_duration, iteration_length=None, num_batches=5, has_length=True):
    """Advance a state as a training loop does over ten samples in batches of two, and yield each event."""
    batches = range(num_batches) if has_length else iter(range(num_batches))
    state = State(model=None, rank_zero_seed=0, max_duration=max_duration, dataloader=batches)
    state.iteration_length = iteration_length
    while state.timestamp < state.max_duration:
        finished_early = False
        for _ in range(num_batches):
            state.previous_timestamp = state.timestamp
            state.timestamp = state.timestamp.to_next_batch(samples=BATCH_SIZE)
            yield state, Event.BATCH_END
            yield state, Event.BATCH_CHECKPOINT
            if state.timestamp >= state.max_duration:
                finished_early = True
                break
        if finished_early and state.timestamp.batch_in_epoch < num_batches:
            break
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        yield state, Event.EPOCH_END
        yield state, Event.EPOCH_CHECKPOINT
        if iteration_length is not None and state.timestamp.epoch_in_iteration >= iteration_length:
            state.previous_timestamp = state.timestamp
            state.timestamp = state.timestamp.to_next_iteration()
            yield state, Event.ITERATION_END
            yield state, Event.ITERATION_CHECKPOINT
    yield state, Event.FIT_END


def due_events(is_due, *args, **kwargs):
    return [
        (state.timestamp.batch.value, event)
        for state, event in events_of_training(*args, **kwargs)
        if is_due(state, event)
    ]


@pytest.mark.parametrize(
    ("interval", "max_duration", "during", "at_end"),
    [
        (1, "5ep", 5, 0),
        ("2ep", "8ep", 4, 0),
        ("10ba", "8ep", 4, 0),
        ("0.25dur", "4ep", 4, 0),
        ("5ba", "10ba", 2, 0),
        ("0.35dur", "4ep", 2, 1),
        ("0.01dur", "100ba", 100, 0),
        ("0.10dur", "70sp", 10, 0),
        ("0.05dur", "80sp", 20, 0),
        ("1dur", "4ep", 1, 0),
        ("0ep", "4ep", 0, 0),
        (-1, "4ep", 0, 0),
    ],
)
def test_evaluation_takes_place_as_often_as_documented(interval, max_duration, during, at_end):
    due = due_events(evaluate_periodically(interval), max_duration)
    assert sum(event is not Event.FIT_END for _, event in due) == during
    assert sum(event is Event.FIT_END for _, event in due) == at_end


@pytest.mark.parametrize(
    ("interval", "max_duration", "iteration_length", "expected"),
    [
        (1, "5ep", None, 5),
        ("2ep", "8ep", None, 4),
        ("10ba", "8ep", None, 4),
        ("0.25dur", "4ep", None, 4),
        ("5ba", "10ba", None, 2),
        ("0.35dur", "4ep", None, 3),
        ("0.01dur", "100ba", None, 100),
        ("0.10dur", "70sp", None, 10),
        ("0.05dur", "80sp", None, 20),
        ("2iter", "8ep", "2ep", 2),
        ("3iter", "8ep", "2ep", 2),
        ("3ba", "8ep", None, 14),
    ],
)
def test_checkpoints_are_due_as_often_as_documented(interval, max_duration, iteration_length, expected):
    due = due_events(create_interval_scheduler(interval), max_duration, iteration_length)
    assert len(due) == expected


def test_a_training_that_begins_again_is_reported_again():
    is_due = create_interval_scheduler("1dur")
    assert due_events(is_due, "4ba") == due_events(is_due, "4ba") == [(4, Event.BATCH_CHECKPOINT)]


@pytest.mark.parametrize("max_duration", ["7ba", "7ep", "14sp"])
def test_a_part_of_training_is_rounded_up_to_whole_batches(max_duration):
    # 0.3 of 7 batches are 2.1: rounded down, it would be due after 2, 4 and 6.
    is_due = create_interval_scheduler("0.3dur", include_end_of_training=False)
    due = due_events(is_due, max_duration, num_batches=1 if max_duration == "7ep" else 5)
    assert [batch for batch, _ in due] == ([3, 5] if max_duration == "14sp" else [3, 6])  # 4.2 samples are 5, not 4


def test_the_interval_can_be_read_from_the_last_cell_of_the_function():
    assert create_interval_scheduler("3ba").__closure__[-1].cell_contents == Time(3, "ba")


def test_iterations_are_an_interval_of_their_own():
    due = due_events(create_interval_scheduler("2iter", include_end_of_training=False), "8ep", Time(2, "ep"))
    assert due == [(20, Event.ITERATION_CHECKPOINT), (40, Event.ITERATION_CHECKPOINT)]


@pytest.mark.parametrize("checkpoint_events", [True, False])
@pytest.mark.parametrize(
    ("interval", "event"),
    [("1ep", "EPOCH"), ("3ba", "BATCH"), ("6sp", "BATCH"), ("0.5dur", "BATCH"), ("1iter", "ITERATION")],
)
def test_each_unit_has_its_event(interval, event, checkpoint_events):
    is_due = create_interval_scheduler(interval, include_end_of_training=False, checkpoint_events=checkpoint_events)
    expected = Event[f"{event}_{'CHECKPOINT' if checkpoint_events else 'END'}"]
    assert {event for _, event in due_events(is_due, "2ep", Time(1, "ep"))} == {expected}


def test_an_interval_in_batches_goes_on_across_epochs():
    due = due_events(create_interval_scheduler("3ba", include_end_of_training=False), "2ep")
    assert [batch for batch, _ in due] == [3, 6, 9]


def test_nothing_is_due_before_the_first_batch():
    state = State(model=None, rank_zero_seed=0, max_duration="1ba", dataloader=[1])
    assert not create_interval_scheduler("1ba")(state, Event.BATCH_CHECKPOINT)


def test_the_end_of_training_can_be_left_out():
    assert due_events(evaluate_periodically("3ba", eval_at_fit_end=False), "5ba") == [(3, Event.BATCH_END)]


def test_whoever_asks_again_gets_the_same_answer():
    due = create_interval_scheduler("2ba")
    asked_twice = due_events(lambda state, event: (due(state, event), due(state, event)) == (True, True), "3ba")
    assert asked_twice == due_events(create_interval_scheduler("2ba"), "3ba")


def test_the_end_of_training_is_due_at_the_final_events_that_are_asked_for():
    is_due = create_interval_scheduler("3ba", final_events={Event.FIT_END})
    assert due_events(is_due, "5ba") == [(3, Event.BATCH_CHECKPOINT), (5, Event.FIT_END)]


@pytest.mark.parametrize(("part", "expected"), [("0.07dur", 7), ("0.14dur", 14), ("0.28dur", 28), ("0.55dur", 55)])
def test_a_part_of_training_is_counted_as_it_is_written(part, expected):
    # In binary each of these times 100 is a little above the whole number that it is.
    assert math.ceil(float(part.removesuffix("dur")) * 100) == expected + 1
    due = due_events(create_interval_scheduler(part, include_end_of_training=False), "100ba")
    assert due[0][0] == expected


@settings(deadline=None)  # a busy machine is no failure
@given(interval=st.integers(1, 12), max_duration=st.integers(1, 40), num_batches=st.integers(1, 7))
def test_an_interval_in_samples_is_due_at_the_first_batch_that_reaches_a_multiple(interval, max_duration, num_batches):
    is_due = create_interval_scheduler(Time(interval, "sp"), include_end_of_training=False)
    due = due_events(is_due, Time(max_duration, "ba"), num_batches=num_batches)
    multiples = range(interval, BATCH_SIZE * max_duration + 1, interval)
    assert [batch for batch, _ in due] == sorted({math.ceil(samples / BATCH_SIZE) for samples in multiples})


def test_a_part_of_training_needs_its_length():
    state = State(model=None, rank_zero_seed=0, max_duration="2ep")
    state.set_dataloader(iter([1, 2]), "train")
    state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch()
    is_due = create_interval_scheduler("0.5dur")
    with pytest.raises(RuntimeError, match=r"state\.dataloader_len"):
        is_due(state, Event.BATCH_CHECKPOINT)
    state.max_duration = None
    with pytest.raises(RuntimeError, match=r"state\.max_duration"):
        is_due(state, Event.BATCH_CHECKPOINT)


def test_seconds_are_an_interval_too():
    state = State(model=None, rank_zero_seed=0, max_duration="9ba")
    is_due = create_interval_scheduler("2sec", include_end_of_training=False)
    due = []
    for _ in range(6):
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(duration=timedelta(seconds=0.75))
        if is_due(state, Event.BATCH_CHECKPOINT):
            due.append(state.timestamp.get(TimeUnit.BATCH).value)
    assert due == [3, 6]  # 2.25 s and 4.5 s


@pytest.mark.parametrize(("max_duration", "batches"), [("2ep", 10), ("7ba", 7), ("14sp", 7)])
def test_all_of_training_needs_no_length(max_duration, batches):
    (evaluated,) = due_events(evaluate_periodically("1dur"), max_duration, has_length=False)
    (saved,) = due_events(create_interval_scheduler("1dur"), max_duration, has_length=False)
    assert evaluated == (batches, Event.FIT_END if max_duration == "2ep" else Event.BATCH_END)
    assert saved == (batches, Event.EPOCH_CHECKPOINT if max_duration == "2ep" else Event.BATCH_CHECKPOINT)
