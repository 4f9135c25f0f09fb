"""Parts of a checkpoint that are left out by their names, also of trees that were made to be a burden."""

import warnings

import pytest

from composer_checkpoint import CorruptCheckpointError, glob_filter
from composer_checkpoint.ignore_keys import without_keys


def left(content, *patterns):
    glob_filter(patterns)(content)
    return content


def test_a_pattern_that_matches_nothing_leaves_everything():
    """A whole checkpoint was left out, without an error, where no pattern matched: sharded loads hung."""
    content = {"state": {"model": {"w": 1}}, "rng": [2]}
    with pytest.warns(UserWarning, match="No parts"):
        assert left(content, "state/model/other") == {"state": {"model": {"w": 1}}, "rng": [2]}


def test_several_items_of_a_list_go_at_once_by_the_places_that_they_had():
    assert left({"a": [0, 1, 2, {"x": 3, "y": 4}]}, "a/0", "a/2", "a/3/x") == {"a": [1, {"y": 4}]}


def test_items_of_tuples_go_as_well():
    assert left({"a": (("name", {"x": 1, "y": 2}), 3)}, "a/0/1/x", "a/1") == {"a": (("name", {"y": 2}),)}


def test_patterns_that_match_inside_of_what_goes_are_no_mistake():
    with warnings.catch_warnings(action="error"):
        assert left({"a": {"b": 1}, "c": 2}, "a", "a/b") == {"c": 2}


@pytest.mark.filterwarnings("ignore:No parts")
@pytest.mark.parametrize("make", [list, tuple, dict])
def test_deep_trees_are_gone_through_without_recursion(make):
    def around(inner):
        return {"a": inner} if make is dict else make([inner])

    content = {"x": 1}
    for _ in range(5000):
        content = around(content)
    found = left({"deep": content}, "*/x", "nothing")["deep"]
    for _ in range(5000):
        (found,) = found.values() if make is dict else found
    assert found == {}


def test_trees_deeper_than_any_checkpoints_are_refused():
    content = []
    for _ in range(50_000):
        content = [content]
    with pytest.raises(CorruptCheckpointError, match="levels deep"):
        left({"deep": content}, "x")


@pytest.mark.filterwarnings("ignore:No parts")
@pytest.mark.parametrize("make", [lambda a: [a, a], lambda a: (a, a), lambda a: {"a": a, "b": a}])
@pytest.mark.parametrize("call", [left, lambda content, *patterns: without_keys(content, [*patterns], "keys")])
def test_trees_that_unfold_to_endless_are_refused(make, call):
    content = make(1)
    for _ in range(60):
        content = make(content)
    with pytest.raises(CorruptCheckpointError, match="unfold to endless"):
        call({"state": content}, "x")


def test_what_is_shared_a_few_times_or_holds_itself_is_gone_through():
    shared = {"x": 1, "y": 2}
    content = {"state": {"a": shared, "b": shared}}
    content["state"]["again"] = content["state"]
    found = without_keys(content, ["state/a/x"], "keys")["state"]
    assert found["a"] == {"y": 2}
    assert found["b"] == {"x": 1, "y": 2}
    assert shared == {"x": 1, "y": 2}
