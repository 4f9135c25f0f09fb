"""The order in which matched algorithms act."""

from collections import Counter
from itertools import permutations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_events import Algorithm, Engine, Event, NotIntendedUseWarning
from composer_events.passes import (
    set_filo_order,
    sort_by_precedence,
    sort_by_surgery_rank,
    sort_fused_layernorm_last,
    sort_low_precision_layernorm_last,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    warn_if_multiple_loss_interpolation,
)
from composer_time import Timestamp


def algorithm(name, base=Algorithm, **class_attributes):
    members = {
        "match": lambda self, event, state: True,
        "apply": lambda self, event, state, logger: None,
        "__repr__": lambda self: name,
        **class_attributes,
    }
    return type(name, (base,), members)()


def order(algorithms, event, **kwargs):
    """Let an engine run the algorithms, and return their names in the order in which it did."""
    state = SimpleNamespace(
        algorithms=list(algorithms), callbacks=[], timestamp=Timestamp(), dataloader=[0], max_duration="1ep"
    )
    engine = Engine(state, **kwargs)
    first = [trace.name for trace in engine.run_event(event).values()]
    again = [trace.name for trace in engine.run_event(event).values()]
    engine.close()
    assert first == again, "what is remembered of an order gives that order"
    return first


PLAIN = [algorithm("A"), algorithm("B"), algorithm("C")]
SELECTIVE_BACKPROP = algorithm("SelectiveBackprop")
LOW_PRECISION = algorithm("LowPrecisionLayerNorm")
MIXUP = algorithm("MixUp", runs_before=frozenset({"LabelSmoothing"}))
CUTMIX = algorithm("CutMix", runs_before=frozenset({"LabelSmoothing"}))
LABEL_SMOOTHING = algorithm("LabelSmoothing")

events = st.sampled_from(list(Event))
classes_of_items = st.lists(st.sampled_from([1, 2.0, "text", True, b"bytes"]))


@pytest.mark.parametrize("event", list(Event))
def test_the_order_is_reversed_exactly_where_the_name_begins_with_after(event):
    expected = PLAIN[::-1] if event.name.startswith("AFTER_") else PLAIN
    assert list(set_filo_order(PLAIN, event)) == expected


@given(classes_of_items)
def test_sorting_to_the_front_is_stable(items):
    ints = [item for item in items if isinstance(item, int)]
    others = [item for item in items if not isinstance(item, int)]
    assert list(map(id, sort_to_front(items, int))) == list(map(id, ints + others))
    assert list(map(id, sort_to_back(items, int))) == list(map(id, others + ints))


@pytest.mark.parametrize("event", [Event.INIT, Event.AFTER_DATALOADER, Event.BEFORE_LOSS])
@pytest.mark.parametrize("place", range(4))
def test_selective_backprop_sees_the_batch_before_the_augmentations(event, place):
    algorithms = [*PLAIN[:place], SELECTIVE_BACKPROP, *PLAIN[place:]]
    assert order(algorithms, event)[0] == "SelectiveBackprop"


@pytest.mark.parametrize("event", [Event.INIT, Event.AFTER_LOAD])
@pytest.mark.parametrize("place", range(4))
def test_low_precision_layers_come_last_also_after_loading(event, place):
    algorithms = [*PLAIN[:place], LOW_PRECISION, *PLAIN[place:]]
    assert order(algorithms, event)[-1] == "LowPrecisionLayerNorm"


@pytest.mark.parametrize("event", [Event.INIT, Event.AFTER_LOAD, Event.BATCH_END])
def test_a_class_can_ask_to_be_first_or_last(event):
    eager, patient = algorithm("Eager", runs_first=True), algorithm("Patient", runs_last=True)
    names = order([patient, *PLAIN, eager], event)
    assert (names[0], names[-1]) == ("Eager", "Patient")


def test_a_subclass_keeps_its_parents_place():
    mine = algorithm("Mine", base=type(SELECTIVE_BACKPROP))
    assert order([*PLAIN, mine], Event.AFTER_DATALOADER)[0] == "Mine"


def test_the_sorts_can_be_called_by_themselves():
    many = [LOW_PRECISION, *PLAIN, SELECTIVE_BACKPROP]
    assert sort_selective_backprop_first(many, Event.INIT) == [SELECTIVE_BACKPROP, LOW_PRECISION, *PLAIN]
    assert sort_low_precision_layernorm_last(many, Event.INIT) == [*PLAIN, SELECTIVE_BACKPROP, LOW_PRECISION]
    assert sort_fused_layernorm_last is sort_low_precision_layernorm_last


RANKED = [
    algorithm("Factorize", surgery_rank=1),
    algorithm("BlurPool", surgery_rank=2),
    algorithm("SqueezeExcite", surgery_rank=3),
    algorithm("ChannelsLast", surgery_rank=6),
]


@pytest.mark.parametrize("listed", list(permutations(RANKED)), ids=str)
def test_model_surgery_is_done_by_rank_whatever_the_list(listed):
    assert order(listed, Event.INIT) == ["Factorize", "BlurPool", "SqueezeExcite", "ChannelsLast"]
    assert order(listed, Event.FIT_START) == [type(a).__name__ for a in listed], "ranks are for surgery only"


def test_surgery_that_says_nothing_is_done_before_what_refers_to_the_finished_model():
    assert order([algorithm("EMA", surgery_rank=7), *PLAIN], Event.INIT) == ["A", "B", "C", "EMA"]


@pytest.mark.parametrize("place", range(5))
def test_what_runs_first_or_last_does_so_on_init_whatever_the_ranks(place):
    listed = [*RANKED[:place], LOW_PRECISION, SELECTIVE_BACKPROP, *RANKED[place:]]
    names = order(listed, Event.INIT)
    assert (names[0], names[-1]) == ("SelectiveBackprop", "LowPrecisionLayerNorm")
    assert names[1:-1] == ["Factorize", "BlurPool", "SqueezeExcite", "ChannelsLast"]


def test_on_init_ranks_come_before_precedence_which_decides_within_a_rank():
    late = algorithm("Late", surgery_rank=1, runs_after=frozenset({"BlurPool", "Factorize"}))
    assert order([late, *RANKED[:2]], Event.INIT) == ["Factorize", "Late", "BlurPool"]


def test_algorithms_of_one_rank_keep_their_order_and_come_after_those_with_a_lower_one():
    assert order([*PLAIN, RANKED[0]], Event.INIT) == ["Factorize", "A", "B", "C"]
    assert list(sort_by_surgery_rank(PLAIN, Event.INIT)) == PLAIN


@pytest.mark.parametrize("listed", list(permutations([MIXUP, CUTMIX, LABEL_SMOOTHING])), ids=str)
def test_batches_are_mixed_before_labels_are_smoothed_and_unmixed_after_they_are_restored(listed):
    assert order(listed, Event.BEFORE_LOSS)[-1] == "LabelSmoothing"
    assert order(listed, Event.AFTER_LOSS)[0] == "LabelSmoothing"


def test_precedence_moves_no_one_else():
    listed = [PLAIN[0], LABEL_SMOOTHING, PLAIN[1], MIXUP, PLAIN[2]]
    assert order(listed, Event.BEFORE_LOSS) == ["A", "B", "MixUp", "LabelSmoothing", "C"]


def test_an_algorithm_that_is_listed_twice_acts_twice():
    assert sort_by_precedence([LABEL_SMOOTHING, MIXUP, MIXUP], Event.BEFORE_LOSS) == [MIXUP, MIXUP, LABEL_SMOOTHING]


def test_an_algorithm_can_also_say_whom_it_runs_after():
    late = algorithm("Late", runs_after=frozenset({"C"}))
    assert order([late, *PLAIN], Event.BATCH_END) == ["A", "B", "C", "Late"]
    assert order([late, *PLAIN], Event.AFTER_LOSS) == ["Late", "C", "B", "A"]


def test_a_circle_of_precedence_is_refused_by_name():
    one = algorithm("One", runs_before=frozenset({"Two"}))
    two = algorithm("Two", runs_before=frozenset({"One"}))
    with pytest.raises(ValueError, match=r"One, Two cannot be put in order on Event\.BATCH_END"):
        sort_by_precedence([one, two], Event.BATCH_END)


@given(st.permutations([*PLAIN, MIXUP, CUTMIX, LABEL_SMOOTHING, SELECTIVE_BACKPROP, LOW_PRECISION, *RANKED]), events)
def test_the_default_passes_lose_and_add_nothing(listed, event):
    assert Counter(order(listed, event)) == Counter(type(a).__name__ for a in listed)


def test_an_engine_orders_each_event_and_each_set_of_algorithms_by_itself():
    state = SimpleNamespace(algorithms=PLAIN, callbacks=[], timestamp=None, dataloader=[0], max_duration="1ep")
    engine = Engine(state)

    def run(event):
        return [trace.name for trace in engine.run_event(event).values()]

    assert run("batch_end") == ["A", "B", "C"]
    assert run("after_loss") == ["C", "B", "A"]
    state.algorithms = [*PLAIN[:2], SELECTIVE_BACKPROP]
    assert run("after_loss") == ["SelectiveBackprop", "B", "A"]
    assert run("batch_end") == ["SelectiveBackprop", "A", "B"]
    engine.close()


def test_two_algorithms_of_one_class_both_act_in_their_order():
    twins = [algorithm("first"), algorithm("second")]
    twins[1].__class__ = type("first", (type(twins[0]),), {"__repr__": lambda self: "second"})
    assert order([PLAIN[0], *twins], Event.AFTER_LOSS) == ["first", "first", "A"]


def test_blending_the_loss_twice_is_warned_about():
    blending = [algorithm("MixUp"), algorithm("CutMix")]
    for one in blending:
        one.interpolate_loss = True
    with pytest.warns(NotIntendedUseWarning, match="CutMix and MixUp all have interpolate_loss=True"):
        assert order(blending, Event.AFTER_LOSS) == ["CutMix", "MixUp"]
    assert warn_if_multiple_loss_interpolation(blending[:1], Event.AFTER_LOSS) == blending[:1]


def test_blending_that_begins_while_training_is_warned_about_too():
    blending = [algorithm("MixUp"), algorithm("CutMix")]
    state = SimpleNamespace(algorithms=blending, callbacks=[], timestamp=None, dataloader=[0], max_duration="1ep")
    engine = Engine(state)
    engine.run_event("before_loss")
    for one in blending:
        one.interpolate_loss = True
    with pytest.warns(NotIntendedUseWarning, match="interpolate_loss=True"):
        engine.run_event("before_loss")
    engine.close()


def keep(algorithms, event):
    return algorithms


def drop_first(algorithms, event):
    return algorithms[1:]


DEFAULTS = Engine(SimpleNamespace(algorithms=[], callbacks=[])).algorithm_passes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, DEFAULTS),
        ([], DEFAULTS),
        (keep, [*DEFAULTS, keep]),
        ((keep, 0), [keep, *DEFAULTS]),
        ([keep, 0], [keep, *DEFAULTS]),
        ((keep, -1), [*DEFAULTS, keep]),
        ((keep, 1), [DEFAULTS[0], keep, *DEFAULTS[1:]]),
        ([keep, drop_first], [*DEFAULTS, keep, drop_first]),
        ([keep, (drop_first, 0)], [drop_first, *DEFAULTS, keep]),
        ([(keep, 0), (drop_first, 0)], [drop_first, keep, *DEFAULTS]),
    ],
)
def test_a_users_passes_go_where_they_are_asked_to(given, expected):
    engine = Engine(SimpleNamespace(algorithms=[], callbacks=[]), algorithm_passes=given)
    assert engine.algorithm_passes == expected
    engine.close()


@pytest.mark.parametrize("given", [3, "name", (keep,), (keep, "0"), (keep, drop_first), [keep, 0, 1], {keep: 0}])
def test_anything_else_is_refused_with_what_is_accepted(given):
    with pytest.raises(ValueError, match=r"algorithm_passes holds .*Accepted: `f`, `\(f, 0\)`"):
        Engine(SimpleNamespace(algorithms=[], callbacks=[]), algorithm_passes=given)


def test_a_users_pass_may_drop_add_and_depend_on_anything():
    turn = iter([[0], [0], [2, 1]])

    def choose(algorithms, event):
        return [algorithms[position] for position in next(turn)]

    state = SimpleNamespace(algorithms=PLAIN, callbacks=[], timestamp=None, dataloader=[0], max_duration="1ep")
    engine = Engine(state, algorithm_passes=choose)
    seen = [[trace.name for trace in engine.run_event("batch_end").values()] for _ in range(3)]
    engine.close()
    assert seen == [["A"], ["A"], ["C", "B"]]


def test_a_pass_that_drops_everything_leaves_no_trace():
    assert order(PLAIN, Event.BATCH_END, algorithm_passes=lambda algorithms, event: []) == []


def test_a_pass_may_add_an_algorithm_to_an_event_that_none_matches():
    """The pass was not called."""
    added = PLAIN[0]

    def add(algorithms, event):
        return [*algorithms, added]

    never = [type("Never", (Algorithm,), {"match": lambda *_: False, "apply": lambda *_: None})()]
    state = SimpleNamespace(algorithms=never, callbacks=[], timestamp=None, dataloader=[0], max_duration="1ep")
    engine = Engine(state)
    assert not engine.run_event("after_loss")
    engine.register_pass(add)
    assert [trace.name for trace in engine.run_event("after_loss").values()] == ["A"]
    engine.close()


def test_passes_can_be_changed_while_the_engine_runs():
    state = SimpleNamespace(algorithms=PLAIN, callbacks=[], timestamp=None, dataloader=[0], max_duration="1ep")
    engine = Engine(state)
    engine.run_event("after_loss")
    engine.register_pass(drop_first)
    assert [trace.name for trace in engine.run_event("after_loss").values()] == ["B", "A"]
    engine.algorithm_passes.clear()
    assert [trace.name for trace in engine.run_event("after_loss").values()] == ["A", "B", "C"]
    engine.close()
