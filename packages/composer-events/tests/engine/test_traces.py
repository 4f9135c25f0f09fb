"""What `run_event` returns and logs about algorithms."""

from collections import OrderedDict

import pytest

from composer_events import Event, Logger, LoggerDestination, Trace


class KeepTraces(LoggerDestination):
    def __init__(self):
        self.calls = []

    def log_traces(self, traces):
        self.calls.append(traces)


def test_traces_tell_who_ran_in_which_order_with_which_result(state, make_engine, make_algorithm):
    state.algorithms += [make_algorithm("One", returns=7), make_algorithm("Two", returns=None)]
    traces = make_engine().run_event(Event.AFTER_LOSS)
    assert traces == OrderedDict(
        {
            "Two/Event.AFTER_LOSS": Trace("Two", Event.AFTER_LOSS, exit_code=None, order=0, run=True),
            "One/Event.AFTER_LOSS": Trace("One", Event.AFTER_LOSS, exit_code=7, order=1, run=True),
        }
    )


def test_an_algorithm_that_does_not_match_neither_acts_nor_leaves_a_trace(state, make_engine, make_algorithm, diary):
    state.algorithms += [make_algorithm("Away", events=[]), make_algorithm("Here")]
    traces = make_engine().run_event("batch_start")
    assert list(traces) == ["Here/Event.BATCH_START"]
    assert "Away" not in diary


def test_callbacks_leave_no_trace(state, make_engine, make_callback):
    state.callbacks.append(make_callback("callback", "batch_end"))
    assert make_engine().run_event("batch_end") == OrderedDict()


def test_what_ran_is_logged_for_destinations_that_take_traces(state, make_engine, make_algorithm):
    kept = KeepTraces()
    state.algorithms += [make_algorithm("One"), make_algorithm("Two")]
    make_engine(Logger(state, kept)).run_event("batch_start")
    assert kept.calls == [{"algorithm_traces/One/Event.BATCH_START": 1, "algorithm_traces/Two/Event.BATCH_START": 1}]


def test_nothing_is_logged_when_no_algorithm_ran(state, make_engine, make_algorithm):
    kept = KeepTraces()
    state.algorithms.append(make_algorithm("Away", events=[]))
    make_engine(Logger(state, kept)).run_event("batch_start")
    assert kept.calls == []


def test_a_logger_of_another_make_is_told_about_traces(state, make_engine, make_algorithm):
    kept = KeepTraces()
    state.algorithms.append(make_algorithm("One"))
    make_engine(kept).run_event("batch_start")
    assert kept.calls == [{"algorithm_traces/One/Event.BATCH_START": 1}]


def test_without_a_logger_the_destinations_among_the_callbacks_are_logged_to(state, make_engine, make_algorithm):
    kept = KeepTraces()
    state.callbacks.append(kept)
    state.algorithms.append(make_algorithm("One"))
    engine = make_engine()
    engine.run_event("batch_start")
    assert engine.logger.destinations == (kept,)
    assert len(kept.calls) == 1


@pytest.mark.parametrize("many", [True, False])
def test_the_older_keyword_appends_algorithms_to_the_state(state, make_engine, make_algorithm, diary, many):
    state.algorithms.append(make_algorithm("First"))
    second = make_algorithm("Second")
    with pytest.warns(DeprecationWarning, match="algorithms=") as caught:
        engine = make_engine(algorithms=[second] if many else second)
    assert caught[0].filename.endswith("conftest.py"), "the warning points at the line that called Engine"
    engine.run_event("batch_start")
    assert diary[-2:] == ["First", "Second"]
