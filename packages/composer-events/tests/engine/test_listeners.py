"""Which callbacks an event reaches, and that nobody else costs anything."""

import sys
from dataclasses import dataclass

import pytest

from composer_events import Callback, Engine, Event, Logger, State


@dataclass  # which makes all of them equal to one another and none of them hashable
class Equal(Callback):
    diary: list

    def batch_end(self, state, logger):
        self.diary.append(id(self))


def test_a_callback_hears_only_the_events_whose_methods_it_overrides(state, make_engine, make_callback, diary):
    state.callbacks += [make_callback("start", "batch_start"), make_callback("end", "batch_end")]
    make_engine().run_event("batch_end")
    assert diary == ["end"]


def test_a_method_that_a_base_class_overrides_counts(state, make_engine, make_callback, diary):
    state.callbacks.append(type("Derived", (type(make_callback("base", "batch_end")),), {})())
    make_engine().run_event("batch_end")
    assert diary == ["base"]


def test_a_callback_that_overrides_run_event_hears_every_event(state, make_engine):
    class HearAll(Callback):
        def __init__(self):
            self.heard = []

        def run_event(self, event, state, logger):
            self.heard.append(event)

    callback = HearAll()
    state.callbacks.append(callback)
    engine = make_engine()
    for event in Event:
        engine.run_event(event)
    assert callback.heard == list(Event)


def test_an_object_of_another_make_hears_every_event(state, make_engine, diary):
    class Duck:
        def run_event(self, event, state, logger):
            diary.append(event)

        def close(self, state, logger):
            pass

        def post_close(self):
            pass

    state.callbacks.append(Duck())
    make_engine().run_event("batch_end")
    assert diary == [Event.BATCH_END]


def test_a_method_that_was_set_on_the_callback_itself_is_heard(state, make_engine, diary):
    callback = Callback()
    callback.batch_end = lambda state, logger: diary.append("own")
    state.callbacks.append(callback)
    make_engine().run_event("batch_end")
    assert diary == ["own"]


def test_a_method_that_is_set_between_engine_and_fit_is_heard(state, make_engine, diary):
    callback = Callback()
    state.callbacks.append(callback)
    engine = make_engine()
    callback.batch_end = lambda state, logger: diary.append("own")
    engine.run_event("fit_start")
    engine.run_event("batch_end")
    assert diary == ["own"]


def test_a_method_that_is_replaced_during_training_is_heard_at_once(state, make_engine, make_callback, diary):
    callback = make_callback("its class's", "batch_end")
    state.callbacks.append(callback)
    engine = make_engine()
    engine.run_event("fit_start")
    engine.run_event("batch_end")
    callback.batch_end = lambda state, logger: diary.append("its own")
    engine.run_event("batch_end")
    del callback.batch_end
    engine.run_event("batch_end")
    assert diary == ["its class's", "its own", "its class's"]


def test_a_method_that_is_replaced_in_the_class_is_heard_when_training_begins(
    state, make_engine, make_callback, diary, monkeypatch
):
    callback = make_callback("old", "batch_end")
    state.callbacks.append(callback)
    engine = make_engine()
    engine.run_event("batch_end")
    monkeypatch.setattr(type(callback), "batch_end", lambda self, state, logger: diary.append("new"))
    engine.run_event("fit_start")
    engine.run_event("batch_end")
    assert diary == ["old", "new"]


def test_a_plain_list_is_compared_by_identity_and_not_by_equality(state, make_engine, diary):
    first, second = Equal(diary), Equal(diary)
    state.callbacks.append(first)
    engine = make_engine()
    state.callbacks[0] = second
    engine.run_event("batch_end")
    assert diary == [id(second)]


def test_callbacks_need_not_be_hashable(state, make_engine, diary):
    state.callbacks += [Equal(diary), Equal(diary)]
    engine = make_engine()
    engine.run_event("init")
    engine.run_event("batch_end")
    assert len(set(diary)) == 2


def set_item(callbacks, new):
    callbacks[0] = new


def set_slice(callbacks, new):
    callbacks[:] = [new]


def delete(callbacks, new):
    del callbacks[0]
    callbacks += [new]


def pop(callbacks, new):
    callbacks.append(new)
    callbacks.pop(0)


def remove(callbacks, new):
    callbacks.extend([new])
    callbacks.remove(callbacks[0])


def clear(callbacks, new):
    callbacks.clear()
    callbacks.insert(0, new)


def multiply(callbacks, new):
    callbacks *= 0
    callbacks.append(new)


def sort(callbacks, new):
    callbacks.append(new)
    callbacks.sort(key=lambda callback: callback is not new)
    callbacks.pop()


def reverse(callbacks, new):
    callbacks.append(new)
    callbacks.reverse()
    callbacks.pop()


@pytest.mark.parametrize("change", [set_item, set_slice, delete, pop, remove, clear, multiply, sort, reverse])
def test_every_change_of_the_list_is_noticed(state, make_callback, diary, change):
    state.callbacks.append(make_callback("old", "batch_end"))
    engine = Engine(state, Logger(state))
    engine.run_event("batch_end")
    change(state.callbacks, make_callback("new", "batch_end"))
    engine.run_event("batch_end")
    engine.close()
    assert diary == ["old", "new", "close new", "post_close new"]


@pytest.mark.parametrize("how", ["reverse", "sort"])
def test_a_change_of_order_alone_is_noticed(state, make_callback, diary, how):
    state.callbacks.extend([make_callback("B", "batch_end"), make_callback("A", "batch_end")])
    engine = Engine(state, Logger(state))
    engine.run_event("batch_end")
    if how == "reverse":
        state.callbacks.reverse()
    else:
        state.callbacks.sort(key=lambda callback: type(callback).__name__)
    engine.run_event("batch_end")
    engine.close()
    assert diary[:4] == ["B", "A", "A", "B"]


def test_another_list_in_place_of_the_first_is_noticed(state, make_callback, diary):
    engine = Engine(state, Logger(state))
    engine.run_event("batch_end")
    state.callbacks = [make_callback("new", "batch_end")]
    engine.run_event("batch_end")
    engine.close()
    assert diary[0] == "new"


def test_an_event_without_listeners_does_the_same_work_for_one_callback_as_for_a_hundred(make_callback):
    def calls_of_run_event(num_callbacks):
        state = State(model=None, rank_zero_seed=0, device="cpu", max_duration="2ep", dataloader=[0])
        state.callbacks.extend(make_callback("elsewhere", "batch_end") for _ in range(num_callbacks))
        engine = Engine(state, Logger(state))
        calls = []
        sys.setprofile(lambda frame, kind, argument: calls.append(kind))
        try:
            engine.run_event(Event.BATCH_START)
        finally:
            sys.setprofile(None)
        engine.close()
        return len(calls)

    assert calls_of_run_event(1) == calls_of_run_event(100)


ENTRANCES = ["init", "fit_start", "eval_standalone_start", "predict_start"]


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_method_that_is_set_before_an_entrance_is_heard_at_it(state, make_engine, diary, entrance):
    callback = Callback()
    state.callbacks.append(callback)
    engine = make_engine()
    setattr(callback, entrance, lambda state, logger: diary.append("own"))
    engine.run_event(entrance)
    assert diary == ["own"]


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_method_that_is_set_while_an_entrance_runs_is_heard_from_then_on(state, make_engine, diary, entrance):
    def prepare(self, state, logger):
        self.batch_end = lambda state, logger: diary.append("own")

    state.callbacks.append(type("Prepare", (Callback,), {entrance: prepare})())
    engine = make_engine()
    engine.run_event(entrance)
    engine.run_event("batch_end")
    assert diary == ["own"]


def test_another_state_in_place_of_the_first_is_noticed(state, make_engine, make_callback, diary):
    engine = make_engine()
    engine.run_event("batch_end")
    engine.state = State(model=None, rank_zero_seed=0, device="cpu", max_duration="2ep", dataloader=[0])
    engine.state.callbacks.append(make_callback("other", "batch_end"))
    engine.run_event("batch_end")
    assert diary == ["other"]


def test_an_algorithm_that_comes_later_is_asked(state, make_engine, make_algorithm, diary):
    engine = make_engine()
    engine.run_event("batch_end")
    state.algorithms.append(make_algorithm("late"))
    engine.run_event("batch_end")
    assert diary == ["match late", "late"]
