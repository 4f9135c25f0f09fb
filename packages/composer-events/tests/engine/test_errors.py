"""What happens when a hook raises, and what the engine refuses."""

import pytest

from composer_events import Algorithm, Callback, Engine, Event, LoggerDestination, State
from composer_time import Timestamp


class OutOfDisk(OSError):
    pass


class Fail(Callback):
    def batch_end(self, state, logger):
        raise OutOfDisk(28, "No space left on device")


class FailToMatch(Algorithm):
    def match(self, event, state):
        raise OutOfDisk(28, "No space left on device")

    def apply(self, event, state, logger):
        raise AssertionError("not reached")


class FailToApply(FailToMatch):
    def match(self, event, state):
        return True

    def apply(self, event, state, logger):
        raise OutOfDisk(28, "No space left on device")


@pytest.mark.parametrize(
    ("hook", "note"),
    [
        (Fail(), "raised by callback Fail on Event.BATCH_END (epoch 1, batch 12)"),
        (FailToMatch(), "raised by algorithm FailToMatch on Event.BATCH_END (epoch 1, batch 12)"),
        (FailToApply(), "raised by algorithm FailToApply on Event.BATCH_END (epoch 1, batch 12)"),
    ],
)
def test_an_exception_reaches_the_caller_as_it_is_with_a_note_about_who_raised_it(state, make_engine, hook, note):
    (state.algorithms if isinstance(hook, Algorithm) else state.callbacks).append(hook)
    with pytest.raises(OutOfDisk) as caught:
        make_engine().run_event("batch_end")
    assert caught.type is OutOfDisk
    assert caught.value.errno == 28
    assert caught.value.__notes__ == [note]


def test_an_exception_keeps_its_note_short_where_the_state_has_no_time(state, make_engine):
    state.callbacks.append(Fail())
    state.timestamp = None
    with pytest.raises(OutOfDisk) as caught:
        make_engine().run_event("batch_end")
    assert caught.value.__notes__ == ["raised by callback Fail on Event.BATCH_END"]


def test_after_an_exception_no_later_hook_runs(state, make_engine, make_callback, diary):
    state.callbacks += [make_callback("before", "batch_end"), Fail(), make_callback("after", "batch_end")]
    with pytest.raises(OutOfDisk):
        make_engine().run_event("batch_end")
    assert diary == ["before"]


def test_a_closed_engine_refuses_events(make_engine):
    engine = make_engine()
    assert not engine.is_closed
    engine.close()
    assert engine.is_closed
    for run in (engine.run_event, engine.run_marker_only_event):
        with pytest.raises(RuntimeError, match="The engine was already closed") as caught:
            run("batch_end")
        assert "Event.BATCH_END" in str(caught.value)


def test_an_unknown_event_is_answered_with_the_nearest_names(make_engine):
    with pytest.raises(ValueError, match="'befor_forward'") as caught:
        make_engine().run_event("befor_forward")
    assert "'before_forward'" in str(caught.value)


def test_something_that_is_no_name_at_all_is_a_type_error(make_engine):
    with pytest.raises(TypeError):
        make_engine().run_event(3)


LOADING = {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD}
WITHOUT_DATALOADER = LOADING | {Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END}
WITHOUT_DURATION = LOADING | {event for event in Event if event.name.startswith(("EVAL_", "PREDICT_"))}


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize(
    ("attribute", "exempt"), [("dataloader", WITHOUT_DATALOADER), ("max_duration", WITHOUT_DURATION)]
)
def test_an_event_asks_for_the_dataloader_and_the_duration_it_needs(state, make_engine, event, attribute, exempt):
    if attribute == "dataloader" and isinstance(state, State):
        state.set_dataloader(None)
    else:
        setattr(state, attribute, None)
    engine = make_engine()
    if event in exempt:
        engine.run_event(event)
    else:
        with pytest.raises(AssertionError, match=rf"{event}.*state\.{attribute} is None"):
            engine.run_event(event)


def test_a_callback_of_an_engine_that_is_not_closed_is_refused_by_name(state, make_engine):
    class MyLogger(LoggerDestination):
        pass

    state.callbacks += [Callback(), MyLogger()]
    first = make_engine()
    first.run_event("init")
    state.callbacks = state.callbacks[1:]
    text = "Cannot create a new trainer with an open callback or logger from a previous trainer.*MyLogger"
    with pytest.raises(RuntimeError, match=text):
        make_engine().run_event("init")
    first.close()


def test_a_callback_of_an_engine_whose_training_is_over_goes_to_the_next(make_callback, diary):
    """Seen before: "Cannot create a new trainer with an open callback", also once training was done."""
    shared, own = make_callback("shared", "batch_end"), make_callback("own")
    first = Engine(State(None, 1, "a", "cpu", max_duration="1ba", callbacks=[shared, own]))
    first.run_event("init")
    second = Engine(State(None, 1, "b", "cpu", max_duration="1ba", callbacks=shared))
    with pytest.raises(RuntimeError, match="has not trained to its end"):
        second.run_event("init")
    first.state.timestamp = Timestamp(batch=1)
    second = Engine(State(None, 1, "b", "cpu", max_duration="1ba", callbacks=shared))
    second.run_event("init")
    assert diary == ["close shared", "close own", "post_close shared", "post_close own"]
    with pytest.raises(RuntimeError, match="whose callbacks a later Trainer has taken"):
        first.run_event("fit_start")
    first.close()
    second.close()
    assert diary[4:] == ["close shared", "post_close shared"]


def test_a_refused_engine_leaves_the_callbacks_of_the_other_one_open(state, make_engine, make_callback, diary):
    state.callbacks.append(make_callback("shared", "batch_end"))
    first, second = make_engine(), make_engine()
    first.run_event("init")
    with pytest.raises(RuntimeError, match="open callback"):
        second.run_event("init")
    second.close()
    assert diary == []
    first.run_event("batch_end")
    assert diary == ["shared"]


def test_a_callback_can_be_used_again_once_its_engine_is_closed(state, make_engine, make_callback, diary):
    state.callbacks.append(make_callback("callback", "init"))
    for _ in range(2):
        engine = make_engine()
        engine.run_event("init")
        engine.close()
    assert diary == ["callback", "close callback", "post_close callback"] * 2


@pytest.mark.parametrize("method", ["close", "post_close"])
def test_a_callback_that_could_not_be_closed_stays_in_use(state, make_engine, method):
    callback = Callback()
    setattr(callback, method, lambda *args: 1 / 0)
    state.callbacks.append(callback)
    engine = make_engine()
    engine.run_event("init")
    engine.close()
    with pytest.raises(RuntimeError, match="open callback"):
        make_engine().run_event("init")


def test_a_second_init_is_refused_and_leaves_the_engine_able_to_close(state, make_engine, make_callback, diary):
    state.callbacks.append(make_callback("callback", "batch_end"))
    engine = make_engine()
    engine.run_event("init")
    with pytest.raises(RuntimeError, match="open callback"):
        engine.run_event("init")
    engine.run_event("batch_end")
    engine.close()
    assert diary == ["callback", "close callback", "post_close callback"]
    make_engine().run_event("init")


@pytest.mark.parametrize("base", [Callback, LoggerDestination])
def test_a_callback_that_another_one_brings_with_it_is_in_use_too(state, make_engine, make_callback, base):
    brought = make_callback("Brought")

    class Bring(base):
        def init(self, state, logger):
            state.callbacks.append(brought)

    state.callbacks.append(Bring())
    make_engine().run_event("init")
    state.callbacks = [brought]
    with pytest.raises(RuntimeError, match=r"open callback.*Brought"):
        make_engine().run_event("init")


def test_an_exception_in_a_pass_says_which_pass_and_when(state, make_engine, make_algorithm):
    def sort_badly(algorithms, event):
        raise OutOfDisk(28, "No space left on device")

    state.algorithms.append(make_algorithm("A"))
    with pytest.raises(OutOfDisk) as caught:
        make_engine(algorithm_passes=sort_badly).run_event("batch_end")
    assert caught.value.__notes__ == ["raised by pass sort_badly on Event.BATCH_END (epoch 1, batch 12)"]


@pytest.mark.parametrize("returned", [None, 3])
def test_a_pass_that_returns_no_algorithms_is_named(state, make_engine, make_algorithm, returned):
    def forget_to_return(algorithms, event):
        return returned

    state.algorithms.append(make_algorithm("A"))
    with pytest.raises(TypeError, match=f"A pass returned {returned}, which is not a sequence of algorithms") as caught:
        make_engine(algorithm_passes=forget_to_return).run_event("batch_end")
    assert caught.value.__notes__ == ["raised by pass forget_to_return on Event.BATCH_END (epoch 1, batch 12)"]


@pytest.mark.parametrize(
    ("hooks", "hook", "message"),
    [
        (
            "callbacks",
            "speed",
            r"state\.callbacks holds 'speed', not a valid callback: it has no run_event\(\)",
        ),
        ("callbacks", Fail, r"state\.callbacks holds <class .*Fail'>.*Put in an object of that class: Fail\(\.\.\.\)"),
        (
            "algorithms",
            "mixup",
            r"state\.algorithms holds 'mixup', not a valid algorithm: it has no match\(\)",
        ),
        ("algorithms", FailToApply, r"holds <class .*Put in an object of that class: FailToApply\(\.\.\.\)"),
    ],
)
@pytest.mark.parametrize("event", ["init", "batch_end"])
def test_a_member_of_a_list_that_is_none_is_named(state, make_engine, hooks, hook, message, event):
    getattr(state, hooks).append(hook)
    with pytest.raises(TypeError, match=message):
        make_engine().run_event(event)
    getattr(state, hooks).clear()
