"""Fit a line by gradient descent in plain Python; a callback stops it when it is close enough."""

import sys
from types import SimpleNamespace

from composer_events import Algorithm, Callback, Engine, Event
from composer_time import Timestamp


class Decay(Algorithm):
    """Halve the step length at the end of each epoch."""

    def match(self, event, state):
        """Answer whether an epoch ends."""
        return event is Event.EPOCH_END

    def apply(self, event, state, logger):
        """Halve it."""
        state.step_length /= 2


class StopWhenClose(Callback):
    """Ends training at a small error."""

    def batch_end(self, state, logger):
        """Compare."""
        state.is_done |= abs(state.error) < 1e-3


points = [(x / 10, 3 * x / 10) for x in range(1, 11)]
state = SimpleNamespace(
    algorithms=[Decay()],
    callbacks=[StopWhenClose()],
    timestamp=Timestamp(),
    dataloader=points,
    max_duration="100ep",
    slope=0.0,
    step_length=1.5,
    error=1.0,
    is_done=False,
)
engine = Engine(state)
engine.run_event(Event.INIT)
while not state.is_done:
    for x, y in state.dataloader:
        state.error = state.slope * x - y
        state.slope -= state.step_length * state.error * x
        state.timestamp = state.timestamp.to_next_batch(samples=1)
        engine.run_event(Event.BATCH_END)
    state.timestamp = state.timestamp.to_next_epoch()
    engine.run_event(Event.EPOCH_END)
engine.close()

assert abs(state.slope - 3) < 0.01
assert "torch" not in sys.modules
print(f"slope {state.slope:.3f} after {state.timestamp.epoch}")
