"""The timestamp and the end of training, the same on all ranks."""

import datetime
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from composer.trainer._rank_sync import Ranks
from composer_dist.progress import Recorder, progress_recorder
from composer_events.engine import Engine, Traces
from composer_events.event import Event
from composer_events.logger import Logger
from composer_events.state import State
from composer_time import Time, Timestamp


def has_time_left(state: State) -> bool:
    """Return whether `max_duration` has not been reached."""
    max_duration = state.max_duration
    return max_duration is not None and state.timestamp < max_duration


class RecordedEngine(Engine):
    """An engine that records each event for the launcher, which finds ranks without progress."""

    def __init__(self, state: State, logger: Logger, algorithm_passes: Any, recorder: Recorder) -> None:
        super().__init__(state, logger, algorithm_passes)
        self._recorder = recorder
        self._closer.context = recorder.closing

    def run_event(self, event: Event | str) -> Traces:
        """Run the event, and record when its hooks begin and end."""
        name, recorder = str(getattr(event, "value", event)), self._recorder
        recorder.enter(name, self.state.timestamp)
        try:
            return super().run_event(event)
        finally:
            recorder.leave(name)


def make_engine(state: State, logger: Logger, algorithm_passes: Any) -> Engine:
    """Return the engine of a Trainer; one that records progress if a launcher reads it."""
    recorder = progress_recorder()
    if recorder is None:
        return Engine(state, logger, algorithm_passes)
    return RecordedEngine(state, logger, algorithm_passes, recorder)


class Clock:
    """Clock of batches, each of which lasts from the end of the previous one to its own end."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    def start_batch(self) -> None:
        """Start the first batch now, so that earlier time is not counted."""
        self._started_s = time.perf_counter()

    def end_batch_s(self) -> float:
        """Return the seconds of the batch that ends now, and start the next one."""
        started_s, self._started_s = self._started_s, time.perf_counter()
        return self._started_s - started_s

    @contextmanager
    def paused(self) -> Generator[None]:
        """Exclude the time of the context from the current batch."""
        paused_s = time.perf_counter()
        try:
            yield
        finally:
            self._started_s += time.perf_counter() - paused_s


class Progress:
    """The progress of one call of `fit`.

    Listeners may stop the training on some ranks alone, and at different batches if they read the clock. Such a rank
    trains on until its request, sent with the counts of the next batch, has reached all ranks, which then stop
    together. The end of the planned duration needs no request, because all ranks have counted the same batches.

    Attributes:
        state: Its timestamp is advanced, and `stop_training` called if another rank has stopped.
        ranks: Exchange the counts and requests.
        clock: Measures the batches.
        planned: `max_duration` at the start of `fit`.
    """

    def __init__(self, state: State, engine: Engine, ranks: Ranks, clock: Clock) -> None:
        self.state = state
        self.ranks = ranks
        self.clock = clock
        self.planned: Time[Any] | None = state.max_duration
        self._engine = engine
        self._request = (False, False)  # whether this rank asks all ranks to stop, and whether it does so for good

    def start_batch(self, num_samples: float, num_tokens: int) -> None:
        """Start to add up a batch over the ranks, and send the request to stop, if any. Every rank must call this."""
        if self.ranks.may_stop and not has_time_left(self.state) and not self._is_past_plan():
            self._request_stop()  # a callback has stopped the training since the last batch
        # By identity, because times in different units cannot be compared.
        has_new_duration = self.state.max_duration is not self.planned
        self.ranks.start_total(num_samples, num_tokens, self.clock.end_batch_s, *self._request, has_new_duration)

    def end_batch(self) -> None:
        """Count the batch. Every rank must call this."""
        samples, tokens, seconds = self.ranks.total()
        duration = datetime.timedelta(seconds=seconds)
        self.advance(self.state.timestamp.to_next_batch(samples=samples, tokens=tokens, duration=duration))

    def advance(self, timestamp: Timestamp) -> None:
        """Set the timestamp."""
        self.state.previous_timestamp, self.state.timestamp = self.state.timestamp, timestamp

    def advance_clock(self) -> None:
        """Add the time since the start of the last batch, if with several ranks it would count for the next one.

        Every rank must call this.
        """
        seconds = self.ranks.seconds_of_last_batch()
        if seconds:
            stamp, duration = self.state.timestamp, datetime.timedelta(seconds=seconds)
            self.state.timestamp = stamp.copy(
                total_wct=stamp.total_wct + duration,
                iteration_wct=stamp.iteration_wct + duration,
                epoch_wct=stamp.epoch_wct + duration,
                batch_wct=stamp.batch_wct + duration,
            )

    def goes_on(self, *, now: bool = True) -> bool:
        """Return whether to continue. If a rank has been stopped, stop all. Every rank must call this.

        Args:
            now: Whether to ask the other ranks. If not, a request to stop takes effect after the next batch.
        """
        state, is_over = self.state, not has_time_left(self.state)
        if not self.ranks.may_stop:
            return not is_over
        has_stopped, is_final, has_new_duration = self.ranks.flags or (False, False, False)
        if now or has_new_duration or self._is_past_plan():
            stopped, stopped_finally = self._request
            is_final = stopped_finally or (is_over and state.stopped_duration is not None)
            has_stopped, is_final = self.ranks.any(is_over or stopped, is_final)
        elif is_over:
            self._request_stop()
            is_over = False
        if has_stopped and not is_over:
            state.stop_training(resumable=not is_final)
        return not has_stopped

    def goes_on_after_save(self) -> bool:
        """Return whether no callback has stopped the training on BATCH_CHECKPOINT, or other ranks must know first."""
        return self.ranks.may_stop or has_time_left(self.state)

    def run_checkpoint(self, event: Event) -> None:
        """Run an event on which the ranks save together, all with the same duration: a stop counts after it."""
        if not self.ranks.may_stop:
            self._engine.run_event(event)
            return
        with self.state.stopping_later():
            self._engine.run_event(event)

    def _is_past_plan(self) -> bool:
        return self.planned is None or self.state.timestamp >= self.planned

    def _request_stop(self) -> None:
        """Ask all ranks to stop after the next batch, and train on until then, as the others do."""
        state = self.state
        self._request = True, state.stopped_duration is not None or self._request[1]
        state.max_duration = self.planned  # or this rank alone would save its last checkpoint
