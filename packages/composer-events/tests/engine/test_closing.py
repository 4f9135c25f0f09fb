"""Closing: in order, once, whatever fails, and whoever asks for it."""

import gc
import importlib
import logging
import signal
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

import composer_events.engine
from composer_events import Callback, DataSpec, Engine, Evaluator


@pytest.fixture
def engine_log(caplog):
    caplog.set_level(logging.DEBUG, logger="composer.core.engine")

    def messages(level):
        engine_records = [record for record in caplog.records if record.name == "composer.core.engine"]
        return [record.getMessage() for record in engine_records if record.levelno == level]

    return messages


def test_every_close_comes_before_every_post_close(state, make_engine, make_callback, make_destination, diary):
    state.callbacks += [make_callback("A"), make_destination("B"), make_callback("C")]
    make_engine().close()
    assert diary == ["close A", "close B", "close C", "post_close A", "post_close B", "post_close C"]


def test_closing_twice_closes_once(state, make_engine, make_callback, diary):
    state.callbacks.append(make_callback("A"))
    engine = make_engine()
    engine.close()
    engine.close()
    assert diary == ["close A", "post_close A"]


def test_closing_says_so_in_the_log(state, make_engine, make_callback, engine_log):
    state.callbacks += [make_callback("A"), make_callback("B")]
    make_engine().close()
    assert engine_log(logging.DEBUG) == [
        "Closing the engine.",
        "Closing callback A",
        "Closing callback B",
        "Post-closing callback A",
        "Post-closing callback B",
        "Engine closed.",
    ]


def test_an_error_while_closing_is_logged_and_the_others_are_closed(
    state, make_engine, make_callback, diary, engine_log, caplog
):
    class FailToClose(Callback):
        def close(self, state, logger):
            raise ZeroDivisionError("the disk is gone")

        def post_close(self):
            diary.append("not reached")

    class FailToPostClose(Callback):
        def post_close(self):
            raise ZeroDivisionError("the network is gone")

    state.callbacks += [FailToClose(), FailToPostClose(), make_callback("A")]
    make_engine().close()
    assert diary == ["close A", "post_close A"]
    errors = engine_log(logging.ERROR)
    assert len(errors) == 2
    assert "FailToClose.close()" in errors[0]
    assert "FailToPostClose.post_close()" in errors[1]
    assert "ZeroDivisionError: the disk is gone" in caplog.text


def test_an_engine_has_one_reference_so_that_it_can_go(state, make_callback):
    state.callbacks.append(make_callback("A", "init"))
    engine = Engine(state)
    engine.run_event("init")
    alone = object()
    assert sys.getrefcount(engine) == sys.getrefcount(alone)  # 2 up to Python 3.13, where the call holds one too
    engine.close()


def test_an_engine_that_nobody_uses_any_more_closes_as_it_goes(state, make_callback, diary):
    state.callbacks.append(make_callback("A"))
    engine = Engine(state)
    engine.run_event("init")
    gc.disable()  # nothing may be needed but the count of references
    try:
        del engine
    finally:
        gc.enable()
    assert diary == ["close A", "post_close A"]


def test_an_engine_whose_constructor_failed_goes_quietly(state):
    with pytest.raises(ValueError, match="algorithm_passes"):
        Engine(state, algorithm_passes=3)
    gc.collect()


AT_EXIT = """
from types import SimpleNamespace
from composer_events import Callback, Engine
from composer_time import Timestamp

class Note(Callback):
    def close(self, state, logger):
        print("close")
    def post_close(self):
        import wave  # a module that nobody has imported yet: the interpreter still has to be whole
        print("post_close", wave.__name__)

state = SimpleNamespace(algorithms=[], callbacks=[Note()], timestamp=Timestamp(), dataloader=[0], max_duration="1ep")
engine = Engine(state)
engine.run_event("init")
{last}
"""


@pytest.mark.parametrize(
    ("last", "status"), [("", 0), ("raise SystemExit(3)", 3), ("cycle = [engine]; cycle.append(cycle)", 0)]
)
def test_the_end_of_the_interpreter_closes_once(last, status):
    command = [sys.executable, "-c", AT_EXIT.format(last=last)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("close\npost_close wave\n", "", status)


def test_the_end_of_the_interpreter_does_not_hold_on_to_a_closed_state(plain_state):
    class Plain(SimpleNamespace):
        """Unlike its base it can be referred to weakly."""

    mine = Plain(**vars(plain_state))
    gone = weakref.ref(mine)
    Engine(mine).close()
    del mine
    gc.collect()
    assert gone() is None


class Workers:
    running = True

    def _shutdown_workers(self):
        self.running = False


class Loader:
    persistent_workers = True

    def __init__(self):
        self._iterator = self.workers = Workers()

    def __iter__(self):
        return iter([])


@pytest.mark.parametrize("where", ["dataloader", "train_dataloader", "train_dataloader in a DataSpec", "evaluator"])
def test_the_persistent_workers_of_every_dataloader_are_ended(plain_state, where):
    loader = Loader()
    if where == "evaluator":
        plain_state.evaluators = [Evaluator(label="a", dataloader=loader, device_eval_microbatch_size=1)]
    else:
        attribute, _, in_data_spec = where.partition(" ")
        setattr(plain_state, attribute, DataSpec(loader) if in_data_spec else loader)
    Engine(plain_state).close()
    assert not loader.workers.running
    assert loader._iterator is None, "so that the dataloader starts new ones"


def test_workers_that_cannot_be_ended_do_not_keep_the_engine_from_closing(state, make_engine, engine_log):
    state.train_dataloader = loader = Loader()
    loader._iterator = object()
    make_engine().close()
    assert engine_log(logging.DEBUG)[-1] == "Engine closed."


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("method", ["close", "post_close"])
def test_an_interrupt_while_closing_reaches_the_caller_once_the_others_are_closed(
    state, make_engine, make_callback, diary, method, interrupt
):
    def be_interrupted(*args):
        raise interrupt

    state.callbacks += [Callback(), make_callback("A")]
    setattr(state.callbacks[0], method, be_interrupted)
    engine = make_engine()
    with pytest.raises(interrupt):
        engine.close()
    assert diary == ["close A", "post_close A"]
    assert engine.is_closed


def test_making_an_engine_installs_no_signal_handler(make_engine):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    make_engine()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_the_module_can_be_loaded_again_outside_the_main_thread():
    original = dict(vars(composer_events.engine))
    problems = []

    def reload():
        try:
            importlib.reload(composer_events.engine)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=reload)
    thread.start()
    thread.join()
    vars(composer_events.engine).update(original)  # one Engine class for the other tests
    assert problems == []
