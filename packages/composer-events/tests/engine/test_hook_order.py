"""Who acts when on one event."""

import pytest

from composer_events import Event

OTHER_EVENTS = [event for event in Event if event is not Event.INIT]


@pytest.fixture
def everyone(state, make_algorithm, make_callback, make_destination):
    events = [event.value for event in Event]
    state.algorithms += [make_algorithm("algorithm 1"), make_algorithm("algorithm 2")]
    state.callbacks += [
        make_callback("callback 1", *events),
        make_destination("logger 1", *events),
        make_callback("callback 2", *events),
        make_destination("logger 2", *events),
    ]


def acts(diary):
    return [entry for entry in diary if not entry.startswith("match")]


@pytest.mark.usefixtures("everyone")
def test_on_init_loggers_come_first_and_algorithms_last(make_engine, diary):
    make_engine().run_event(Event.INIT)
    expected = ["logger 1", "logger 2", "callback 1", "callback 2", "algorithm 1", "algorithm 2"]
    assert acts(diary) == expected


@pytest.mark.usefixtures("everyone")
@pytest.mark.parametrize("event", OTHER_EVENTS)
def test_on_other_events_algorithms_come_first_and_loggers_last(make_engine, diary, event):
    make_engine().run_event(event)
    assert acts(diary)[2:] == ["callback 1", "callback 2", "logger 1", "logger 2"]


@pytest.mark.usefixtures("everyone")
@pytest.mark.parametrize("event", OTHER_EVENTS)
def test_algorithms_run_in_reverse_exactly_where_the_name_begins_with_after(make_engine, diary, event):
    make_engine().run_event(event)
    forward = ["algorithm 1", "algorithm 2"]
    assert acts(diary)[:2] == (forward[::-1] if event.name.startswith("AFTER_") else forward)


@pytest.mark.usefixtures("everyone")
def test_every_match_is_asked_once_and_before_any_algorithm_acts(make_engine, diary):
    make_engine().run_event("batch_end")
    assert diary[:4] == ["match algorithm 1", "match algorithm 2", "algorithm 1", "algorithm 2"]
    assert sum(entry.startswith("match") for entry in diary) == 2


def test_a_callback_that_an_algorithm_adds_hears_the_same_event(state, make_engine, make_callback, diary):
    from composer_events import Algorithm

    class AddCallback(Algorithm):
        def match(self, event, state):
            return True

        def apply(self, event, state, logger):
            state.callbacks.append(make_callback("late", "batch_end"))

    state.algorithms.append(AddCallback())
    make_engine().run_event("batch_end")
    assert diary == ["late"]


def test_a_callback_that_a_logger_adds_on_init_hears_init(state, make_engine, make_callback, diary):
    from composer_events import LoggerDestination

    class AddCallback(LoggerDestination):
        def init(self, state, logger):
            state.callbacks.append(make_callback("late", "init"))

    state.callbacks.append(AddCallback())
    make_engine().run_event("init")
    assert diary == ["late"]


@pytest.mark.parametrize("spelling", ["batch_end", "BATCH_END", "Batch_End", Event.BATCH_END])
def test_an_event_can_be_named_by_a_string(state, make_engine, make_callback, diary, spelling):
    state.callbacks.append(make_callback("callback", "batch_end"))
    make_engine().run_event(spelling)
    assert diary == ["callback"]
