import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_checkpoint.retention import RetentionPolicy, SavedCheckpoint, choose_to_delete
from composer_time import Time, Timestamp

METRIC = "metrics/eval/MulticlassAccuracy"


def epochs(*numbers, metrics=None):
    values = metrics or [{}] * len(numbers)
    return [
        SavedCheckpoint(f"ep{number}", Timestamp(epoch=number), value)
        for number, value in zip(numbers, values, strict=True)
    ]


def kept(history, setting, **kwargs):
    deleted = choose_to_delete(history, RetentionPolicy.from_setting(setting), **kwargs)
    return [saved.name for saved in history if saved.name not in deleted]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (-1, ["ep1", "ep2", "ep3", "ep4"]),
        (None, ["ep1", "ep2", "ep3", "ep4"]),
        ({}, ["ep1", "ep2", "ep3", "ep4"]),
        (0, []),
        (1, ["ep4"]),
        (3, ["ep2", "ep3", "ep4"]),
        (9, ["ep1", "ep2", "ep3", "ep4"]),
        ({"last": 2}, ["ep3", "ep4"]),
        ({"every": "2ep"}, ["ep2", "ep4"]),
        ({"last": 1, "every": "3ep"}, ["ep3", "ep4"]),
    ],
)
def test_the_last_and_the_periodic_ones_are_kept(setting, expected):
    assert kept(epochs(1, 2, 3, 4), setting) == expected


def test_the_best_are_kept_and_so_is_the_newest():
    values = [{METRIC: value} for value in (0.5, 0.9, 0.7, 0.6, 0.1)]
    history = epochs(1, 2, 3, 4, 5, metrics=values)
    assert kept(history, {"best": (METRIC, "max", 2)}) == ["ep2", "ep3", "ep5"]
    assert kept(history, {"best": (METRIC, "min", 2)}) == ["ep1", "ep5"]


@pytest.mark.parametrize(
    ("metric", "best"),
    [("metrics/eval/CrossEntropy", "ep2"), ("loss/train/total", "ep2"), ("metrics/eval/MIoU", "ep1")],
)
def test_without_a_mode_the_best_are_those_by_the_name_of_the_metric(metric, best):
    """The largest were kept, of a loss too."""
    history = epochs(1, 2, 3, metrics=[{metric: value} for value in (0.9, 0.1, 0.5)])
    assert kept(history, {"best": (metric, None, 1)}) == [best, "ep3"]
    assert kept(history, RetentionPolicy(metric=metric, num_best=1)) == [best, "ep3"]


@pytest.mark.parametrize(("is_higher", "best"), [(True, "ep1"), (False, "ep2")])
def test_without_a_mode_the_metric_itself_says_which_are_best(is_higher, best):
    """The largest were kept, whatever the metric says."""
    metric = SimpleNamespace(higher_is_better=is_higher)
    history = epochs(1, 2, 3, metrics=[{"metrics/eval/Loss": value} for value in (0.9, 0.1, 0.5)])
    policy = RetentionPolicy(metric="metrics/eval/Loss", num_best=1).with_mode(metric)
    assert kept(history, policy) == [best, "ep3"]


def test_a_mode_that_nobody_knows_is_asked_for():
    with pytest.raises(ValueError, match=r"'metrics/eval/Foo' nor its name.*Say 'max' or 'min'"):
        RetentionPolicy(metric="metrics/eval/Foo", num_best=1).with_mode()


def test_of_equally_good_ones_the_oldest_is_kept():
    history = epochs(1, 2, 3, 4, metrics=[{METRIC: 0.5}, {METRIC: 0.5}, {METRIC: 0.4}, {METRIC: 0.5}])
    assert kept(history, {"best": (METRIC, "max", 1)}) == ["ep1", "ep4"]


def test_what_was_not_measured_or_is_no_number_is_not_the_best():
    history = epochs(1, 2, 3, 4, metrics=[{METRIC: math.nan}, {}, {METRIC: 0.1}, {}])
    assert kept(history, {"best": (METRIC, "max", 1)}) == ["ep3", "ep4"]


def test_what_was_not_measured_stays_until_enough_are():
    history = epochs(1, 2, 3, 4, metrics=[{}, {}, {METRIC: 0.1}, {}])
    assert kept(history, {"best": (METRIC, "max", 2)}) == ["ep1", "ep2", "ep3", "ep4"]
    history += epochs(5, metrics=[{METRIC: 0.2}])
    assert kept(history, {"best": (METRIC, "max", 2)}) == ["ep3", "ep5"]


def test_the_first_at_or_after_each_multiple_is_the_periodic_one():
    history = [SavedCheckpoint(f"ba{batch}", Timestamp(batch=batch)) for batch in (30, 70, 110, 140, 205, 290, 310)]
    assert kept(history, {"every": "100ba"}) == ["ba110", "ba205", "ba310"]


def test_the_target_of_the_pointer_is_kept():
    assert kept(epochs(1, 2, 3), 1, latest="ep1") == ["ep1", "ep3"]


@pytest.mark.parametrize(
    "setting",
    [
        -2,
        1.5,
        "3",
        {"last": -1},
        {"last": 1.5},
        {"every": "0ep"},
        {"every": "-1ep"},
        {"every": "0.5dur"},
        {"newest": 3},
        {"best": METRIC},
        {"best": (METRIC, "largest", 1)},
        {"best": (METRIC, "max", -1)},
    ],
)
def test_a_setting_that_says_nothing_sensible_is_refused(setting):
    with pytest.raises(ValueError, match=r"must be|does not say|is not an interval|says not"):
        RetentionPolicy.from_setting(setting)


histories = st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), st.floats())), max_size=12).map(
    lambda steps: [
        SavedCheckpoint(f"ba{batch}", Timestamp(batch=batch), {} if value is None else {METRIC: value})
        for batch, (_, value) in zip(itertools.accumulate(step for step, _ in steps), steps, strict=True)
    ]
)
policies = st.builds(
    RetentionPolicy,
    last=st.one_of(st.none(), st.integers(0, 4)),
    every=st.one_of(st.none(), st.integers(1, 30).map(Time.from_batch)),
    metric=st.one_of(st.none(), st.just(METRIC)),
    mode=st.sampled_from(["max", "min"]),
    num_best=st.integers(0, 3),
)


@settings(deadline=None)
@given(histories, policies)
def test_deleting_twice_deletes_no_more_than_deleting_once(history, policy):
    deleted = choose_to_delete(history, policy)
    left = [saved for saved in history if saved.name not in deleted]
    assert choose_to_delete(left, policy) == []


@settings(deadline=None)
@given(histories, policies)
def test_deleting_after_each_save_keeps_what_deleting_at_the_end_keeps(history, policy):
    left = []
    for saved in history:
        left.append(saved)
        deleted = choose_to_delete(left, policy)
        left = [other for other in left if other.name not in deleted]
    at_once = choose_to_delete(history, policy)
    assert [saved.name for saved in left] == [saved.name for saved in history if saved.name not in at_once]


@settings(deadline=None)
@given(histories, policies)
def test_the_newest_is_deleted_only_where_none_at_all_is_wanted(history, policy):
    if history and policy != RetentionPolicy(last=0):
        assert history[-1].name not in choose_to_delete(history, policy)
