"""A plain state, engines that are closed after the test, and hooks that write down when they are called."""

from types import SimpleNamespace

import pytest

from composer_events import Algorithm, Callback, Engine, LoggerDestination, State
from composer_time import Timestamp


@pytest.fixture
def plain_state():
    """Everything that an engine asks of a state, and no more."""
    return SimpleNamespace(
        algorithms=[], callbacks=[], timestamp=Timestamp(epoch=1, batch=12), dataloader=[0], max_duration="2ep"
    )


@pytest.fixture(params=["plain object", "State"])
def state(request, plain_state):
    """A state of either kind, since an engine has a short way for events that do nothing to a `State`."""
    if request.param == "plain object":
        return plain_state
    state = State(model=None, rank_zero_seed=0, device="cpu", max_duration="2ep", dataloader=[0])
    state.timestamp = plain_state.timestamp
    return state


@pytest.fixture
def make_engine(state):
    """Make engines over the state."""
    made = []

    def make(*args, **kwargs):
        made.append(Engine(state, *args, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def diary():
    """What happened, in order."""
    return []


@pytest.fixture
def make_algorithm(diary):
    """Make an algorithm, of a class of that name, that writes `name` when it acts."""

    def make(name, events=None, returns=None, **class_attributes):
        def match(self, event, state):
            diary.append(f"match {name}")
            return events is None or event in events

        def apply(self, event, state, logger):
            diary.append(name)
            return returns

        members = {"match": match, "apply": apply, "__str__": lambda self: name, **class_attributes}
        return type(name, (Algorithm,), members)()

    return make


@pytest.fixture
def make_callback(diary):
    """Make a callback, of a class of that name, that writes `name` on the given events and when it is closed."""

    def make(name, *events, base=Callback):
        members = {event: lambda self, state, logger: diary.append(name) for event in events}
        members["close"] = lambda self, state, logger: diary.append(f"close {name}")
        members["post_close"] = lambda self: diary.append(f"post_close {name}")
        return type(name, (base,), members)()

    return make


@pytest.fixture
def make_destination(make_callback):
    """Make a logger destination that writes `name` on the given events."""
    return lambda name, *events: make_callback(name, *events, base=LoggerDestination)
