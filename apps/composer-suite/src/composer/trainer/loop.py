"""The training loop: all events in order, with the calls between them.

Algorithms and callbacks act on the events. The table in `composer_events.event` describes when each event runs.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer.trainer._data import Clock, TrainBatches, has_time_left
from composer.trainer._evaluation import Evaluation, EvaluationBatches
from composer.trainer._fit_settings import SchedulerSteps
from composer.trainer._rank_sync import Ranks
from composer.trainer._report import Report
from composer.trainer._shutdown import Preemption
from composer.trainer._step import BatchTrainer
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.state import State
from composer_time import Time, Timestamp


class FitEvaluation:
    """Runs the evaluators that are due on an event of `fit`, with the training clock paused."""

    def __init__(
        self, state: State, engine: Engine, evaluation: Evaluation, clock: Clock, take_evaluators: Callable[[], None]
    ) -> None:
        self._state = state
        self._engine = engine
        self._evaluation = evaluation
        self._clock = clock
        self._data = EvaluationBatches(state)
        self._take_evaluators = take_evaluators
        self._evaluators = state.evaluators  # always the same list object
        self._version: int | None = None  # of the list, when the evaluators were last prepared

    def __call__(self, event: Event) -> bool:
        """Run the evaluators that are due on BATCH_END, EPOCH_END or FIT_END, and return whether there were any."""
        state, evaluators = self._state, self._evaluators
        if evaluators.version != self._version:
            self._take_evaluators()
            self._version = evaluators.version
        due = [each for each in evaluators if each.eval_interval is not None and each.eval_interval(state, event)]
        if not due:
            return False
        with self._clock.paused():
            self._engine.run_event(Event.EVAL_BEFORE_ALL)
            for evaluator in due:
                self._evaluation.run(evaluator, open_batches=self._data.open)
            self._engine.run_event(Event.EVAL_AFTER_ALL)
        return True


@dataclass(slots=True)
class Loop:
    """The training loop of one call of `fit`."""

    state: State
    engine: Engine
    batches: TrainBatches
    train_batch: BatchTrainer
    schedulers: SchedulerSteps
    evaluate: FitEvaluation
    report: Report
    clock: Clock
    ranks: Ranks
    preemption: Preemption
    planned: Time[Any] | None = None

    def fit(self) -> None:
        """Train until `state.max_duration` is reached."""
        state, run_event = self.state, self.engine.run_event
        schedulers, evaluators = state.schedulers, state.evaluators  # always the same list objects

        self.planned = state.max_duration
        self.report.algorithms()
        run_event(Event.FIT_START)
        self.batches.resume()
        state.model.train()
        while self._goes_on():
            # A resumed run may begin in the middle of an epoch, whose start events have run before.
            if state.timestamp.epoch_in_iteration == 0 and state.timestamp.batch_in_epoch == 0:
                run_event(Event.ITERATION_START)
            if state.timestamp.batch_in_epoch == 0:
                self.batches.begin_epoch()
                run_event(Event.EPOCH_START)
                self.report.epoch()

            self.clock.start_batch()
            for state.batch in self.batches:
                self._start_total()
                if schedulers:
                    self.schedulers.before_batch()
                run_event(Event.AFTER_DATALOADER)
                run_event(Event.BATCH_START)
                self.report.time()

                losses = self.train_batch()  # BEFORE_TRAIN_BATCH ... AFTER_TRAIN_BATCH, the optimizer's step
                self.report.batch(losses)
                self._advance_batch()
                if schedulers:
                    self.schedulers.after_batch()

                run_event(Event.BATCH_END)
                has_evaluated = bool(evaluators) and self.evaluate(Event.BATCH_END)
                goes_on = self._goes_on(now=has_evaluated)  # before a save, in which all ranks take part
                if not goes_on:
                    self._advance_clock()
                self._run_checkpoint(Event.BATCH_CHECKPOINT)
                if not goes_on or not self._goes_on_alone():
                    break
                self.preemption.leave_if_asked()

            if self.batches.epoch_is_complete():
                self.report.metrics()
                self._advance_clock()
                self._advance(state.timestamp.to_next_epoch())
                if schedulers:
                    self.schedulers.after_epoch()

                run_event(Event.EPOCH_END)
                self.evaluate(Event.EPOCH_END)
                # Called for its effect: if a rank has stopped, all stop before the save, in which all take part.
                self._goes_on()
                self._run_checkpoint(Event.EPOCH_CHECKPOINT)
                if self.batches.iteration_is_complete():
                    self._advance(state.timestamp.to_next_iteration())

                    run_event(Event.ITERATION_END)
                    self._goes_on()
                    self._run_checkpoint(Event.ITERATION_CHECKPOINT)

        # Results of the last batches may still be on the device; an error must come before FIT_END.
        self.train_batch.finish()
        self.report.epoch_and_time()
        run_event(Event.FIT_END)
        self.evaluate(Event.FIT_END)

    def _run_checkpoint(self, event: Event) -> None:
        """Run an event on which the ranks save together, all with the same duration: a stop counts after it."""
        if not self.ranks.may_stop:
            self.engine.run_event(event)
            return
        with self.state.stopping_later():
            self.engine.run_event(event)

    def _goes_on(self, *, now: bool = True) -> bool:
        """Return whether to continue. If a rank has been stopped, stop all. Every rank must call this.

        Args:
            now: Whether to ask the other ranks. If not, a rank that has been stopped trains on until all know of it,
                which is after the next batch; the end of the planned duration is known to all.
        """
        state, is_over = self.state, not has_time_left(self.state)
        if not self.ranks.may_stop:
            return not is_over
        if now or self.ranks.has_new_duration or self._is_past_plan():
            stops, is_final = self.ranks.any_stops(is_over, is_final=is_over and state.stopped_duration is not None)
        else:
            if is_over:
                self._postpone_stop()
                is_over = False
            stops, is_final = self.ranks.stops
        if stops and not is_over:
            state.stop_training(resumable=not is_final)
        return not stops

    def _is_past_plan(self) -> bool:
        return self.planned is None or self.state.timestamp >= self.planned

    def _postpone_stop(self) -> None:
        """Ask all ranks to stop after the next batch, and train on until then, as the others do."""
        state = self.state
        self.ranks.request_stop(is_final=state.stopped_duration is not None)
        state.max_duration = self.planned  # or this rank alone would save its last checkpoint

    def _goes_on_alone(self) -> bool:
        """Return whether no callback has stopped the training on BATCH_CHECKPOINT, or other ranks must know first."""
        return self.ranks.may_stop or has_time_left(self.state)

    def _start_total(self) -> None:
        if self.ranks.may_stop and not has_time_left(self.state) and not self._is_past_plan():
            self._postpone_stop()  # a callback has stopped the training since the last batch
        self.ranks.start_total(
            self.batches.num_samples,
            self.batches.num_tokens,
            self.clock.end_batch_s,
            # By identity, because times in different units cannot be compared.
            has_new_duration=self.state.max_duration is not self.planned,
        )

    def _advance_batch(self) -> None:
        samples, tokens, seconds = self.ranks.total()
        duration = datetime.timedelta(seconds=seconds)
        self._advance(self.state.timestamp.to_next_batch(samples=samples, tokens=tokens, duration=duration))

    def _advance_clock(self) -> None:
        """Add the time since the start of the last batch, if with several ranks it would count for the next one."""
        seconds = self.ranks.seconds_of_last_batch()
        if seconds:
            stamp, duration = self.state.timestamp, datetime.timedelta(seconds=seconds)
            self.state.timestamp = stamp.copy(
                total_wct=stamp.total_wct + duration,
                iteration_wct=stamp.iteration_wct + duration,
                epoch_wct=stamp.epoch_wct + duration,
                batch_wct=stamp.batch_wct + duration,
            )

    def _advance(self, timestamp: Timestamp) -> None:
        self.state.previous_timestamp, self.state.timestamp = self.state.timestamp, timestamp
