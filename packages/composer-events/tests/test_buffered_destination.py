import copy
import gc
import itertools
import pickle
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from composer_events import BufferedDestination, Callback, Engine, Logger, LoggerDestination, State, log_lazily
from composer_events.logger_destination import restored
from composer_time import Timestamp


class Late(BufferedDestination):
    def __init__(self):
        self.taken = []

    def take_metrics(self, logged):
        self.taken += logged

    @property
    def metrics(self):
        return [metrics for metrics, *_ in self.taken]


class LateCopies(Late):
    copies_values = True


class AtOnce(LoggerDestination):
    def __init__(self):
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((metrics, step))


@pytest.fixture
def state():
    return SimpleNamespace(timestamp=Timestamp(batch=3))


def test_what_was_logged_comes_when_asked_for_in_order_and_once(state):
    late = Late()
    logger = Logger(state, late)
    for loss in (0.5, 0.25):
        logger.log_metrics({"loss": loss})
    assert late.taken == []
    late.catch_up()
    late.catch_up()
    assert late.metrics == [{"loss": 0.5}, {"loss": 0.25}]


def test_what_nobody_asks_for_does_not_grow(state):
    late = Late()
    logger = Logger(state, late)
    for loss in range(1000):
        logger.log_metrics({"loss": loss})
    assert 1000 - len(late.taken) < 256
    assert late.metrics == [{"loss": loss} for loss in range(len(late.taken))]


def test_others_are_told_at_once(state):
    late, at_once = Late(), AtOnce()
    Logger(state, [late, at_once]).log_metrics({"loss": 0.5})
    assert late.taken == []
    assert at_once.metrics == [({"loss": 0.5}, 3)]


def test_all_get_everything_when_one_asks(state):
    late, other = Late(), Late()
    Logger(state, [late, other]).log_metrics({"loss": 0.5})
    late.catch_up()
    assert other.metrics == [{"loss": 0.5}]


def test_later_changes_of_the_callers_dict_do_not_show(state):
    late, metrics = Late(), {"loss": 0.5}
    Logger(state, late).log_metrics(metrics)
    metrics["loss"] = 0.0
    late.catch_up()
    assert late.metrics == [{"loss": 0.5}]


def test_copies_need_no_torch(state):
    late, losses = LateCopies(), [0.5]
    Logger(state, late).log_metrics({"losses": losses})
    losses.clear()
    late.catch_up()
    [(_, copies, _, _)] = late.taken
    assert restored(copies["losses"]) == [0.5]


def test_each_call_has_its_time_and_step(state):
    late = Late()
    logger = Logger(state, late)
    logger.log_metrics({"loss": 0.5})
    state.timestamp = state.timestamp.to_next_batch()
    logger.log_metrics({"loss": 0.25}, step=7)
    state.timestamp.load_state_dict(Timestamp(batch=100).state_dict())  # in place, as loading a checkpoint does
    late.catch_up()
    assert [(stamp.num_batches, step) for _, _, stamp, step in late.taken] == [(3, None), (4, 7)]


def test_what_is_logged_after_loading_has_the_loaded_time():
    late, state = Late(), State(model=None, rank_zero_seed=0)
    logger = Logger(state, late)
    logger.log_metrics({"loss": 0.5})
    state.load_state_dict({"timestamp": {"Timestamp": Timestamp(batch=100).state_dict()}})
    logger.log_metrics({"loss": 0.25})
    late.catch_up()
    assert [stamp.num_batches for _, _, stamp, _ in late.taken] == [0, 100]


def test_called_by_hand_it_takes_what_came_before_first(state):
    late = Late()
    Logger(state, late).log_metrics({"loss": 0.5})
    late.log_metrics({"loss": 0.25})
    assert late.metrics == [{"loss": 0.5}, {"loss": 0.25}]


def test_other_destinations_do_not_cost_the_old_ones_anything(state):
    late, later = Late(), Late()
    logger = Logger(state, late)
    logger.log_metrics({"loss": 0.5})
    logger.destinations = later
    logger.log_metrics({"loss": 0.25})
    later.catch_up()
    assert late.metrics == [{"loss": 0.5}]
    assert later.metrics == [{"loss": 0.25}]


def test_nothing_is_lost_when_the_logger_is(state):
    late = Late()
    Logger(state, late).log_metrics({"loss": 0.5})
    gc.collect()
    late.catch_up()
    assert late.metrics == [{"loss": 0.5}]


def test_several_loggers_may_write_to_one(state):
    late = Late()
    loggers = [Logger(state, late), Logger(state, late)]
    for logger in loggers:
        logger.log_metrics({"loss": 0.5})
    late.catch_up()
    assert late.metrics == [{"loss": 0.5}] * 2


def test_a_subclass_with_its_own_log_metrics_is_called_each_time(state):
    class Mine(Late):
        def log_metrics(self, metrics, step=None):
            super().log_metrics({**metrics, "mine": True}, step)

    mine = Mine()
    Logger(state, mine).log_metrics({"loss": 0.5})
    assert mine.metrics == [{"loss": 0.5, "mine": True}]


def test_a_method_put_on_one_is_called_each_time(state):
    late, calls = Late(), []
    late.log_metrics = lambda metrics, step: calls.append(metrics)
    Logger(state, late).log_metrics({"loss": 0.5})
    assert calls == [{"loss": 0.5}]


def test_one_that_cannot_take_anything_is_refused():
    with pytest.raises(TypeError, match="take_metrics"):
        BufferedDestination()


class Broken(Late):
    def take_metrics(self, logged):
        raise OSError("full")


def test_one_that_fails_costs_the_others_nothing(state):
    first, last = Late(), Late()
    logger = Logger(state, [first, Broken(), last])
    logger.log_metrics({"loss": 0.5})
    with pytest.raises(OSError, match="full"):
        first.catch_up()
    assert first.metrics == last.metrics == [{"loss": 0.5}]


class Division:
    """Remembers when it was asked, and of which batches."""

    def __init__(self):
        self.asked = []

    def __call__(self, now, done, seconds):
        self.asked.append(now.num_batches)
        return {"speed": done / seconds}


def test_what_is_logged_lazily_is_computed_when_it_is_read_and_belongs_to_when_it_was_logged(state):
    late, divide = Late(), Division()
    logger = Logger(state, late)
    log_lazily(state, logger, divide, 6, 2)
    logger.log_metrics({"loss": 0.5})
    state.timestamp = Timestamp(batch=9)
    assert divide.asked == []
    late.catch_up()
    assert divide.asked == [3]
    assert late.metrics == [{"speed": 3}, {"loss": 0.5}]
    assert late.taken[0][2].batch == "3ba"


def test_what_is_logged_lazily_is_never_computed_where_nobody_takes_metrics(state):
    divide = Division()
    log_lazily(state, Logger(state, LoggerDestination()), divide, 6, 2)
    assert divide.asked == []


def test_what_is_logged_lazily_is_computed_at_once_where_somebody_takes_it_at_once(state):
    late, at_once, divide = Late(), AtOnce(), Division()
    log_lazily(state, Logger(state, [late, at_once]), divide, 6, 2)
    assert at_once.metrics == [({"speed": 3}, 3)]
    late.catch_up()
    assert late.metrics == [{"speed": 3}]
    assert divide.asked == [3]


class OnlyLatest(Late):
    takes_latest = True


@pytest.mark.parametrize(("others", "expected"), [((), [3, 7, 4, 8]), ((Late(),), [3, 1, 7, 4, 8])])
def test_what_is_replaced_later_is_not_computed_where_only_the_latest_counts(others, expected):
    late, divide, state = OnlyLatest(), Division(), SimpleNamespace(timestamp=Timestamp(batch=3))
    logger = Logger(state, [late, *others])
    log_lazily(state, logger, divide, 6, 2)  # the same function, and nothing replaces it
    log_lazily(state, logger, divide, 2, 2, replaces="speed")
    log_lazily(state, logger, divide, 14, 2, replaces="other")
    logger.log_metrics({"loss": 0.5})
    state.timestamp = Timestamp(batch=9)
    log_lazily(state, logger, divide, 8, 2)
    log_lazily(state, logger, divide, 16, 2, replaces="speed")
    late.catch_up()
    assert [metrics["speed"] for metrics in late.metrics if "speed" in metrics] == expected
    assert {"loss": 0.5} in late.metrics


class OwnLogger(Logger):
    def log_metrics(self, metrics, step=None):
        super().log_metrics({f"own/{name}": value for name, value in metrics.items()}, step)


def test_what_is_logged_lazily_goes_through_a_logger_of_ones_own(state):
    late, seen = Late(), []
    log_lazily(state, OwnLogger(state, late), Division(), 6, 2)
    log_lazily(state, SimpleNamespace(log_metrics=seen.append), Division(), 8, 2)
    replaced = Logger(state, late)
    replaced.log_metrics = seen.append
    log_lazily(state, replaced, Division(), 10, 2)
    late.catch_up()
    assert late.metrics == [{"own/speed": 3}]
    assert seen == [{"speed": 4}, {"speed": 5}]


def test_what_is_logged_lazily_goes_where_the_method_of_another_logger_leads(state):
    late, other = Late(), Late()
    logger, others = Logger(state, late), Logger(state, other)
    log_lazily(state, SimpleNamespace(log_metrics=others.log_metrics), Division(), 6, 2)
    logger.log_metrics = others.log_metrics
    log_lazily(state, logger, Division(), 8, 2)
    late.catch_up()
    other.catch_up()
    assert (late.metrics, other.metrics) == ([], [{"speed": 3}, {"speed": 4}])


def test_what_is_logged_lazily_goes_through_a_method_that_replaces_the_loggers(state, monkeypatch):
    seen = []
    monkeypatch.setattr(Logger, "log_metrics", lambda logger, metrics, step=None: seen.append(metrics))
    log_lazily(state, Logger(state, Late()), Division(), 8, 2)
    assert seen == [{"speed": 4}]


def test_values_belong_to_a_time_that_was_loaded_into_the_timestamp(state):
    late = Late()
    logger = Logger(state, late)
    logger.log_metrics({"loss": 0.5})
    log_lazily(state, logger, lambda now: {"batch": now.num_batches})
    state.timestamp.load_state_dict(Timestamp(batch=1).state_dict())
    logger.log_metrics({"loss": 0.25})
    log_lazily(state, logger, lambda now: {"batch": now.num_batches})
    late.catch_up()
    assert late.metrics == [{"loss": 0.5}, {"batch": 3}, {"loss": 0.25}, {"batch": 1}]
    assert [now.num_batches for _, _, now, _ in late.taken] == [3, 3, 1, 1]


def test_nothing_is_lost_where_another_thread_reads(state):
    class ReadByAnother:
        """A value that somebody else reads the destination of while it is looked at."""

        def __deepcopy__(self, memo):
            thread = threading.Thread(target=late.catch_up)
            thread.start()
            thread.join()
            return "copied"

    late = LateCopies()
    logger = Logger(state, late)
    logger.log_metrics({"loss": 0.5})
    logger.log_metrics({"odd": ReadByAnother()})
    late.catch_up()
    assert [list(metrics) for metrics in late.metrics] == [["loss"], ["odd"]]


def test_an_empty_result_logs_nothing(state):
    late, at_once = Late(), AtOnce()
    log_lazily(state, Logger(state, at_once), lambda now: {})
    log_lazily(state, Logger(state, late), lambda now: {})
    late.catch_up()
    assert at_once.metrics == late.metrics == []


def test_what_fails_to_be_computed_is_raised_and_costs_the_rest_nothing(state):
    late = Late()
    logger = Logger(state, late)
    log_lazily(state, logger, Division(), 1, 0)
    log_lazily(state, logger, Division(), 6, 2)
    with pytest.raises(ZeroDivisionError) as raised:
        late.catch_up()
    assert raised.value.__notes__ == ["It was raised by Division, which computes what was logged at batch 3."]
    late.catch_up()
    assert late.metrics == [{"speed": 3}]


def test_calls_that_nobody_asks_for_do_not_grow(state):
    late, divide = Late(), Division()
    logger = Logger(state, late)
    for done in range(1000):
        log_lazily(state, logger, divide, done, 2)
    assert 1000 - len(divide.asked) < 256
    assert late.metrics == [{"speed": done / 2} for done in range(len(late.taken))]


def test_an_error_says_who_failed_to_take_what_and_not_only_who_asked():
    class Asks(Late):
        def batch_end(self, state, logger):
            self.catch_up()

    asks, other = Asks(), Late()
    state = SimpleNamespace(
        algorithms=[], callbacks=[other, Broken(), asks], timestamp=Timestamp(), dataloader=[1], max_duration="1ep"
    )
    engine = Engine(state)
    engine.logger.log_metrics({"loss": 0.5})
    state.timestamp = Timestamp(batch=4)
    engine.logger.log_metrics({"loss": 0.25})
    with pytest.raises(OSError, match="full") as raised:
        engine.run_event("batch_end")
    assert raised.value.__notes__ == [
        "The destination Broken raised it while it received metrics that were logged up to batch 4. A hook that is "
        "named below may only have requested them.",
        "raised by callback Asks on Event.BATCH_END (epoch 0, batch 4)",
    ]
    engine.close()
    assert asks.metrics == other.metrics == [{"loss": 0.5}, {"loss": 0.25}]


def test_others_get_everything_once_when_a_computation_is_interrupted(state):
    def interrupt(now):
        raise KeyboardInterrupt

    late = Late()
    logger = Logger(state, late)
    logger.log_metrics({"loss": 0.5})
    log_lazily(state, logger, interrupt)
    with pytest.raises(KeyboardInterrupt):
        late.catch_up()
    late.catch_up()
    assert late.metrics == [{"loss": 0.5}]


def test_new_destinations_take_over_though_an_old_one_fails(state):
    late = Late()
    logger = Logger(state, Broken())
    logger.log_metrics({"loss": 0.5})
    with pytest.raises(OSError, match="full"):
        logger.destinations = late
    logger.log_metrics({"loss": 0.25})
    late.catch_up()
    assert late.metrics == [{"loss": 0.25}]


class LogsWhenClosed(Callback):
    def close(self, state, logger):
        logger.log_metrics({"closed": 1})
        self.logger = logger

    def post_close(self):
        self.logger.log_metrics({"closed": 2})


class Writes(Late):
    """Has its own `close`, calls no other, and knows then what came before."""

    def close(self, state, logger):
        self.at_close = [*self.metrics]
        logger.log_metrics({"closed": 0})


class FailsToClose(Late):
    def close(self, state, logger):
        raise OSError("no such file")


@pytest.mark.parametrize("order", list(itertools.permutations([LogsWhenClosed, Writes, FailsToClose, Broken, Late])))
def test_closing_hands_over_everything_in_any_order_whoever_fails(order):
    callbacks = [kind() for kind in order]
    engine = Engine(SimpleNamespace(algorithms=[], callbacks=callbacks, timestamp=Timestamp()))
    engine.logger.log_metrics({"loss": 0.5})
    log_lazily(engine.state, engine.logger, lambda now: {"speed": 3})

    engine.close()

    kept = [place for place in callbacks if type(place) in (Writes, FailsToClose, Late)]
    assert kept[0].metrics[:2] == [{"loss": 0.5}, {"speed": 3}]
    assert sorted(metrics["closed"] for metrics in kept[0].metrics[2:]) == [0, 1, 2]
    assert kept[0].metrics == kept[1].metrics == kept[2].metrics
    [writes] = [place for place in callbacks if type(place) is Writes]
    assert writes.at_close[:2] == [{"loss": 0.5}, {"speed": 3}]


@pytest.mark.parametrize("kind", [FailsToClose, Late])
def test_a_lone_destination_gets_what_is_logged_after_it_was_closed(kind):
    late = kind()
    engine = Engine(SimpleNamespace(algorithms=[], callbacks=[late, LogsWhenClosed()], timestamp=Timestamp()))
    engine.logger.log_metrics({"loss": 0.5})
    engine.close()
    assert late.metrics == [{"loss": 0.5}, {"closed": 1}, {"closed": 2}]


def test_what_fails_to_be_handed_over_at_the_end_is_logged_and_everybody_is_closed(caplog):
    class Closes(Late):
        closings = ()

        def close(self, state, logger):
            self.closings = (*self.closings, "close")

        def post_close(self):
            self.closings = (*self.closings, "post_close")

    closes = Closes()
    engine = Engine(SimpleNamespace(algorithms=[], callbacks=[closes, Broken()], timestamp=Timestamp()))
    engine.logger.log_metrics({"loss": 0.5})
    engine.close()
    assert closes.closings == ("close", "post_close")
    [record] = caplog.records
    assert record.getMessage() == "Error delivering metrics while closing."
    assert "The destination Broken raised it" in record.exc_text
    assert closes.metrics == [{"loss": 0.5}]


def test_a_method_put_on_one_later_is_called_each_time_from_then_on_and_until_it_is_taken_away(state):
    late, other, calls = Late(), Late(), []
    logger = Logger(state, [late, other])
    logger.log_metrics({"loss": 0.5})
    late.log_metrics = lambda metrics, step: calls.append((metrics, step))
    logger.log_metrics({"loss": 0.25})
    log_lazily(state, logger, lambda now: {"speed": 3})
    assert calls == [({"loss": 0.25}, 3), ({"speed": 3}, 3)]
    del late.log_metrics
    logger.log_metrics({"loss": 0.125})
    assert late.metrics == [{"loss": 0.5}]  # late again
    other.catch_up()
    assert late.metrics == [{"loss": 0.5}, {"loss": 0.125}]
    assert other.metrics == [{"loss": 0.5}, {"loss": 0.25}, {"speed": 3}, {"loss": 0.125}]
    assert len(calls) == 2


def test_a_spy_around_the_method_of_one_lets_everything_through(state, monkeypatch):
    late = Late()
    logger = Logger(state, late)
    with mock.patch.object(late, "log_metrics", wraps=late.log_metrics) as spy, monkeypatch.context() as patches:
        logger.log_metrics({"loss": 0.5})
        patches.setattr(late, "log_metrics", spy)
        logger.log_metrics({"loss": 0.25})
        assert spy.call_count == 2
    assert late.metrics == [{"loss": 0.5}, {"loss": 0.25}]


def test_what_was_found_may_be_put_back(state):
    late, calls = Late(), []
    logger = Logger(state, late)
    found = late.log_metrics
    late.log_metrics = lambda metrics, step: calls.append(metrics)
    late.log_metrics = found
    logger.log_metrics({"loss": 0.5})
    assert late.metrics == calls == []  # as late as before
    late.catch_up()
    assert late.metrics == [{"loss": 0.5}]


def test_a_used_destination_is_copied_with_what_is_to_come_and_without_its_logger(state):
    late = Late()
    logger = Logger(SimpleNamespace(timestamp=state.timestamp, model=threading.Lock()), late)
    logger.log_metrics({"loss": 0.5})
    for same in (copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        same.catch_up()
        assert same.metrics == [{"loss": 0.5}]
    assert late.metrics == []
