"""What a profiler and the debug log are shown."""

import logging

import pytest

from composer_events import Engine, Event, ProfilerAction
from composer_time import Timestamp


class Marker:
    def __init__(self, name, diary):
        self.name, self.diary = name, diary

    def start(self):
        self.diary.append(f"start {self.name}")

    def finish(self):
        self.diary.append(f"finish {self.name}")

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.finish()


class Profiler:
    """Keeps what it is asked for; its markers write down when they start and finish."""

    def __init__(self, diary):
        self.asked, self.diary = {}, diary

    def marker(self, name, actions=(), categories=()):
        self.asked[name] = (set(actions), list(categories))
        return Marker(name, self.diary)


@pytest.fixture
def profiler(state, diary):
    state.profiler = Profiler(diary)
    return state.profiler


def test_a_pair_of_events_is_timed_from_after_its_first_hooks_to_before_its_last(
    state, profiler, make_engine, make_callback, diary
):
    state.callbacks.append(make_callback("Note", "batch_start", "batch_end"))
    engine = make_engine()
    engine.run_event("batch_start")
    engine.run_event("batch_end")
    assert diary == [
        "start callback/Note/event/batch_start",
        "Note",
        "finish callback/Note/event/batch_start",
        "start event/batch",
        "finish event/batch",
        "start callback/Note/event/batch_end",
        "Note",
        "finish callback/Note/event/batch_end",
    ]


def test_algorithms_and_callbacks_are_timed_under_their_class_and_event(
    state, profiler, make_engine, make_algorithm, make_callback
):
    state.algorithms.append(make_algorithm("MixUp"))
    state.callbacks.append(make_callback("Monitor", "after_loss"))
    make_engine().run_event("after_loss")
    assert profiler.asked == {
        "algorithm/MixUp/event/after_loss": (set(), ["after_loss", "MixUp"]),
        "callback/Monitor/event/after_loss": (set(), ["after_loss", "Monitor"]),
    }


RECORDED = {ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE, ProfilerAction.WARMUP}


@pytest.mark.parametrize(
    ("event", "actions"),
    [
        (Event.BATCH_START, RECORDED),
        (Event.BEFORE_DATALOADER, RECORDED),
        (Event.FIT_START, RECORDED | {ProfilerAction.SKIP}),
        (Event.EPOCH_START, RECORDED | {ProfilerAction.SKIP}),
    ],
)
def test_events_are_recorded_up_to_the_last_active_batch(profiler, make_engine, event, actions):
    make_engine().run_event(event)
    assert profiler.asked[f"event/{event.canonical_name}"][0] == actions


def test_an_end_without_a_beginning_is_not_timed(profiler, make_engine, diary):
    make_engine().run_event("epoch_end")
    assert diary == []


def test_a_beginning_whose_end_never_came_is_finished_before_the_next_one(profiler, make_engine, diary):
    engine = make_engine()
    engine.run_event("batch_start")
    engine.run_event("batch_start")
    assert diary == ["start event/batch", "finish event/batch", "start event/batch"]


def test_a_marker_only_event_runs_nothing_else(state, profiler, make_engine, make_algorithm, make_callback, diary):
    state.algorithms.append(make_algorithm("Algorithm"))
    state.callbacks.append(make_callback("Callback", "after_dataloader"))
    engine = make_engine()
    engine.run_event("before_dataloader")
    diary.clear()
    engine.run_marker_only_event("after_dataloader")
    assert diary == ["finish event/dataloader"]


def test_events_that_stand_alone_have_no_time(profiler, make_engine):
    engine = make_engine()
    for event in (Event.INIT, Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT):
        engine.run_event(event)
    assert profiler.asked == {}


def test_debug_lines_tell_where_each_hook_runs(state, make_engine, make_algorithm, make_callback, caplog, monkeypatch):
    monkeypatch.setenv("ENGINE_DEBUG", "1")
    caplog.set_level(logging.DEBUG, logger="composer.core.engine")
    state.algorithms.append(make_algorithm("MixUp"))
    state.callbacks.append(make_callback("Monitor", "batch_end"))
    state.eval_timestamp, state.predict_timestamp = Timestamp(batch=3), Timestamp(batch=4)
    engine = make_engine()
    for event in ("batch_end", "eval_start", "predict_end"):
        engine.run_event(event)
    assert [record.getMessage() for record in caplog.records] == [
        "[ep=1][ba=12][event=BATCH_END]: Running event",
        "[ep=1][ba=12][event=BATCH_END]: Running algorithm MixUp",
        "[ep=1][ba=12][event=BATCH_END]: Running callback Monitor",
        "[ep=1][ba=12][eval_ba=3][event=EVAL_START]: Running event",
        "[ep=1][ba=12][eval_ba=3][event=EVAL_START]: Running algorithm MixUp",
        "[ep=1][ba=12][predict_ba=4][event=PREDICT_END]: Running event",
        "[ep=1][ba=12][predict_ba=4][event=PREDICT_END]: Running algorithm MixUp",
    ]


def test_without_the_variable_an_event_writes_no_line(state, make_engine, make_callback, caplog, monkeypatch):
    monkeypatch.delenv("ENGINE_DEBUG", raising=False)
    caplog.set_level(logging.DEBUG, logger="composer.core.engine")
    state.callbacks.append(make_callback("Monitor", "batch_end"))
    make_engine().run_event("batch_end")
    assert caplog.records == []


def test_debug_lines_tell_of_events_that_nobody_listens_to(make_engine, caplog, monkeypatch):
    monkeypatch.setenv("ENGINE_DEBUG", "1")
    caplog.set_level(logging.DEBUG, logger="composer.core.engine")
    make_engine().run_event("batch_start")
    assert [record.getMessage() for record in caplog.records] == [
        "[ep=1][ba=12][event=BATCH_START]: Running event",
    ]


def test_debug_lines_leave_out_a_time_that_a_plain_state_does_not_count(plain_state, caplog, monkeypatch):
    monkeypatch.setenv("ENGINE_DEBUG", "1")
    caplog.set_level(logging.DEBUG, logger="composer.core.engine")
    engine = Engine(plain_state)
    engine.run_event("eval_start")
    engine.run_event("predict_start")
    assert [record.getMessage() for record in caplog.records] == [
        "[ep=1][ba=12][event=EVAL_START]: Running event",
        "[ep=1][ba=12][event=PREDICT_START]: Running event",
    ]
    engine.close()
