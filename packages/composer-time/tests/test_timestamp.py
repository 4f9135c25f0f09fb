import copy
import datetime
import operator
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_time import Time, Timestamp, TimeUnit

COUNTERS = {
    "iteration": "iter",
    "epoch": "ep",
    "batch": "ba",
    "sample": "sp",
    "token": "tok",
    "epoch_in_iteration": "ep",
    "token_in_iteration": "tok",
    "batch_in_epoch": "ba",
    "sample_in_epoch": "sp",
    "token_in_epoch": "tok",
}
CLOCKS = ["total_wct", "iteration_wct", "epoch_wct", "batch_wct"]
ZERO = datetime.timedelta(0)
SECOND = datetime.timedelta(seconds=1)

# Different from one another and from the default, in the order of the constructor.
DISTINCT = {name: count for count, name in enumerate(COUNTERS, start=1)} | {
    name: seconds * SECOND for seconds, name in enumerate(CLOCKS, start=1)
}

counts = st.integers(0, 10**12)
durations = st.timedeltas(min_value=ZERO, max_value=datetime.timedelta(days=100))
states = st.fixed_dictionaries(dict.fromkeys(COUNTERS, counts) | dict.fromkeys(CLOCKS, durations))
steps = st.one_of(
    st.tuples(st.just("batch"), counts, counts, st.none() | durations),
    st.tuples(st.just("epoch"), st.none() | durations),
    st.tuples(st.just("iteration"), st.none() | durations),
)


# Making and reading


def test_a_run_starts_at_zero():
    timestamp = Timestamp()
    assert [getattr(timestamp, name) for name in COUNTERS] == [Time(0, unit) for unit in COUNTERS.values()]
    assert [getattr(timestamp, name) for name in CLOCKS] == [ZERO] * 4


def test_arguments_have_their_documented_order():
    assert Timestamp(*DISTINCT.values()) == Timestamp(**DISTINCT)


def test_each_counter_reads_as_a_time_and_each_clock_as_a_timedelta():
    timestamp = Timestamp(**DISTINCT)
    for name, unit in COUNTERS.items():
        time = getattr(timestamp, name)
        assert (time.value, time.unit) == (DISTINCT[name], TimeUnit(unit))
    for name in CLOCKS:
        assert getattr(timestamp, name) == DISTINCT[name]


@pytest.mark.parametrize(("name", "unit"), COUNTERS.items())
def test_a_counter_takes_an_int_a_time_or_text_of_its_unit(name, unit):
    from_int, from_time, from_text = (Timestamp(**{name: count}) for count in (3, Time(3, unit), f"3{unit}"))
    assert from_int == from_time == from_text
    assert getattr(from_int, name) == Time(3, unit)


@pytest.mark.parametrize("name", COUNTERS)
@pytest.mark.parametrize("count", [Time(3, "sec"), "3sec", "0.5dur"])
def test_a_counter_in_another_unit_is_refused_by_name(name, count):
    with pytest.raises(ValueError, match=rf"^{name}=.* is counted in '(sec|dur)'"):
        Timestamp(**{name: count})


@pytest.mark.parametrize("name", COUNTERS)
@pytest.mark.parametrize("count", [None, 1.0, [1], SECOND])
def test_a_counter_of_another_kind_is_refused(name, count):
    with pytest.raises(TypeError, match=rf"^{name}=.* is of type (float|NoneType|list|timedelta)\."):
        Timestamp(**{name: count})


@pytest.mark.parametrize("name", CLOCKS)
@pytest.mark.parametrize("duration", [None, 1, 1.5, "1s", Time(1, "sec")])
def test_a_clock_takes_only_a_timedelta(name, duration):
    with pytest.raises(TypeError, match=rf"^{name}=.*datetime\.timedelta"):
        Timestamp(**{name: duration})


@pytest.mark.parametrize("name", sorted(set(DISTINCT) - {"epoch_in_iteration"}))
def test_a_timestamp_cannot_be_changed(name):
    with pytest.raises(AttributeError):
        setattr(Timestamp(), name, DISTINCT[name])


def test_the_epoch_in_its_iteration_may_be_set():
    timestamp = Timestamp()
    timestamp.epoch_in_iteration = "3ep"
    assert timestamp == Timestamp(epoch_in_iteration=3)
    with pytest.raises(ValueError, match="epoch_in_iteration"):
        timestamp.epoch_in_iteration = "3ba"


@pytest.mark.parametrize("unit", ["iter", "ep", "ba", "sp", "tok"])
def test_get_answers_in_any_counted_unit(unit):
    timestamp = Timestamp(**DISTINCT)
    name = TimeUnit(unit).name.lower()
    assert timestamp.get(unit) == timestamp.get(TimeUnit(unit)) == timestamp.get(name) == getattr(timestamp, name)


@given(durations)
def test_get_answers_in_whole_seconds_of_the_whole_run(total):
    assert Timestamp(total_wct=total).get("sec") == Time(total // SECOND, "sec")


def test_a_timestamp_knows_no_fraction_of_training():
    with pytest.raises(ValueError, match="no counter for 'dur'"):
        Timestamp().get("dur")
    with pytest.raises(ValueError, match="no counter for 'dur'"):
        assert Timestamp() < "0.5dur"
    with pytest.raises(ValueError, match="no counter for 'dur'"):
        assert Timestamp() == Time(0.5, "dur")


@given(states)
def test_the_repr_evaluates_to_an_equal_timestamp(state):
    timestamp = Timestamp(**state)
    assert eval(repr(timestamp)) == timestamp


def test_the_repr_names_every_field():
    assert repr(Timestamp()).startswith("Timestamp(iteration=0, epoch=0, batch=0, sample=0, token=0, ")
    assert repr(Timestamp()).endswith(", batch_wct=datetime.timedelta(0))")


# Comparing

ORDERINGS = [operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.parametrize("compare", [operator.eq, operator.ne, *ORDERINGS])
@pytest.mark.parametrize("unit", ["iter", "ep", "ba", "sp", "tok", "sec"])
@pytest.mark.parametrize("there", [2, 3, 4])
def test_a_timestamp_compares_with_a_length_by_the_counter_of_its_unit(compare, unit, there):
    counter = {"sec": {"total_wct": 3.9 * SECOND}}.get(unit, {TimeUnit(unit).name.lower(): 3})
    timestamp = Timestamp(**counter)
    expected = compare(3, there)
    assert compare(timestamp, Time(there, unit)) is expected
    assert compare(timestamp, f"{there}{unit}") is expected
    swapped = compare(there, 3)
    assert compare(Time(there, unit), timestamp) is swapped
    assert compare(f"{there}{unit}", timestamp) is swapped


@given(states, st.sampled_from([*COUNTERS, *CLOCKS]))
def test_timestamps_are_equal_if_everything_in_them_is(state, name):
    other = state | {name: state[name] + (SECOND if name in CLOCKS else 1)}
    assert Timestamp(**state) == Timestamp(**state)
    assert Timestamp(**state) != Timestamp(**other)


@pytest.mark.parametrize("other", [0, 1.5, None, ZERO, {}])
def test_a_timestamp_is_unequal_to_other_things(other):
    assert (Timestamp() == other) is False
    assert (Timestamp() != other) is True


@pytest.mark.parametrize("compare", ORDERINGS)
@pytest.mark.parametrize("other", [0, 1.5, None, ZERO, Timestamp()])
def test_a_timestamp_has_an_order_only_with_lengths(compare, other):
    with pytest.raises(TypeError):
        compare(Timestamp(), other)


def test_a_timestamp_has_no_hash():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Timestamp())


# Moving on


def moved_plainly(state, step):
    """Return the state after a step, worked out field by field from the table of transitions."""
    kind, *amounts, duration = step
    duration = duration or ZERO
    change, zero = {}, ()
    if kind == "batch":
        samples, tokens = amounts
        change = {"batch": 1, "batch_in_epoch": 1, "sample": samples, "sample_in_epoch": samples}
        change |= {"token": tokens, "token_in_epoch": tokens, "token_in_iteration": tokens}
        change |= {"total_wct": duration, "iteration_wct": duration, "epoch_wct": duration}
        change |= {"batch_wct": duration - state["batch_wct"]}
    elif kind == "epoch":
        change = {"epoch": 1, "epoch_in_iteration": 1, "total_wct": duration, "iteration_wct": duration}
        zero = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch", "epoch_wct", "batch_wct")
    else:
        change = {"iteration": 1, "total_wct": duration}
        zero = ("epoch_in_iteration", "token_in_iteration", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
        zero += ("iteration_wct", "epoch_wct", "batch_wct")
    after = {name: value + change.get(name, value - value) for name, value in state.items()}
    return after | {name: state[name] - state[name] for name in zero}


def moved(timestamp, step):
    """Return the timestamp after a step."""
    kind, *amounts = step
    return getattr(timestamp, f"to_next_{kind}")(*amounts)


@given(states, st.lists(steps, min_size=1, max_size=8))
def test_a_run_of_steps_ends_where_the_table_of_transitions_says(state, run):
    timestamp = Timestamp(**state)
    for step in run:
        state, timestamp = moved_plainly(state, step), moved(timestamp, step)
    assert timestamp.state_dict() == state


@given(states, steps)
def test_a_step_leaves_the_timestamp_before_it_as_it_was(state, step):
    timestamp = Timestamp(**state)
    moved(timestamp, step)
    assert timestamp == Timestamp(**state)


def test_a_step_without_amounts_counts_one_batch_and_no_time():
    before = Timestamp(**DISTINCT)
    after = before.to_next_batch()
    assert after == before.copy(batch=before.batch + 1, batch_in_epoch=before.batch_in_epoch + 1, batch_wct=ZERO)


def test_a_step_takes_amounts_as_lengths():
    assert Timestamp().to_next_batch("32sp", Time(512, "tok")) == Timestamp().to_next_batch(32, 512)


@pytest.mark.parametrize(
    ("amounts", "error", "name"),
    [
        ({"samples": "32ba"}, ValueError, "samples"),
        ({"tokens": Time(1, "sp")}, ValueError, "tokens"),
        ({"samples": None}, TypeError, "samples"),
        ({"duration": 1.5}, TypeError, "duration"),
    ],
)
def test_a_step_refuses_what_is_no_amount_by_name(amounts, error, name):
    with pytest.raises(error, match=f"^{name}="):
        Timestamp().to_next_batch(**amounts)


# Copying, saving, restoring


@given(states, states, st.sets(st.sampled_from(list(DISTINCT))))
def test_a_copy_has_the_overrides_and_keeps_the_rest(state, other, names):
    overrides = {name: other[name] for name in names}
    assert Timestamp(**state).copy(**overrides) == Timestamp(**(state | overrides))


def test_a_copy_is_another_object_and_none_keeps_a_value():
    timestamp = Timestamp(**DISTINCT)
    twin = timestamp.copy(epoch=None, total_wct=None)
    assert twin == timestamp
    assert twin is not timestamp


def test_a_copy_refuses_names_that_are_not_fields():
    with pytest.raises(TypeError, match="epohc"):
        Timestamp().copy(epohc=1)


@given(states)
def test_the_state_is_the_constructors_arguments_as_plain_values(state):
    assert Timestamp(**state).state_dict() == state
    assert list(Timestamp(**state).state_dict()) == [*COUNTERS, *CLOCKS]


@given(states, states)
def test_a_loaded_state_replaces_everything(state, other):
    timestamp = Timestamp(**other)
    timestamp.load_state_dict(Timestamp(**state).state_dict())
    assert timestamp == Timestamp(**state)


OPTIONAL = ["iteration", "epoch_in_iteration", "token_in_iteration", *CLOCKS]


def test_what_old_checkpoints_lack_stays_as_it_is():
    timestamp = Timestamp(**{name: value + value for name, value in DISTINCT.items()})
    kept = {name: value for name, value in timestamp.state_dict().items() if name in OPTIONAL}
    timestamp.load_state_dict({name: value for name, value in DISTINCT.items() if name not in OPTIONAL})
    assert timestamp.state_dict() == DISTINCT | kept


@pytest.mark.parametrize("name", sorted(set(DISTINCT) - set(OPTIONAL)))
def test_a_state_without_an_essential_counter_is_refused_by_name(name):
    state = {key: value for key, value in DISTINCT.items() if key != name}
    with pytest.raises(KeyError, match=rf"lacks {name};"):
        Timestamp().load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value", "error"), [("token_in_epoch", "1ep", ValueError), ("batch_wct", 1, TypeError)]
)
def test_a_state_that_does_not_fit_changes_nothing(name, value, error):
    timestamp = Timestamp()
    with pytest.raises(error, match=f"^{name}="):
        timestamp.load_state_dict(DISTINCT | {name: value})
    assert timestamp == Timestamp()


@pytest.mark.parametrize("restored", [copy.copy, copy.deepcopy, lambda stamp: pickle.loads(pickle.dumps(stamp))])
def test_a_copied_or_pickled_timestamp_is_equal_and_moves_on(restored):
    twin = restored(Timestamp(**DISTINCT))
    assert twin == Timestamp(**DISTINCT)
    assert twin.to_next_batch(1, 1, SECOND) == Timestamp(**DISTINCT).to_next_batch(1, 1, SECOND)


@pytest.mark.parametrize(
    ("number", "counter"),
    [
        ("num_iterations", "iteration"),
        ("num_epochs", "epoch"),
        ("num_batches", "batch"),
        ("num_samples", "sample"),
        ("num_tokens", "token"),
        ("num_batches_in_epoch", "batch_in_epoch"),
        ("num_samples_in_epoch", "sample_in_epoch"),
        ("num_tokens_in_epoch", "token_in_epoch"),
    ],
)
def test_the_plain_numbers_are_the_counters(number, counter):
    stamp = Timestamp(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert getattr(stamp, number) == getattr(stamp, counter).value
    assert type(getattr(stamp, number)) is int
