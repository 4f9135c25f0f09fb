"""The training loop: all events in order, with the calls between them.

Algorithms and callbacks act on the events. The table in `composer_events.event` describes when each event runs.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass

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
from composer_time import Timestamp


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

    def __call__(self, event: Event) -> None:
        """Run the evaluators that are due on BATCH_END, EPOCH_END or FIT_END."""
        state, evaluators = self._state, self._evaluators
        if evaluators.version != self._version:
            self._take_evaluators()
            self._version = evaluators.version
        due = [each for each in evaluators if each.eval_interval is not None and each.eval_interval(state, event)]
        if not due:
            return
        with self._clock.paused():
            self._engine.run_event(Event.EVAL_BEFORE_ALL)
            for evaluator in due:
                self._evaluation.run(evaluator, open_batches=self._data.open)
            self._engine.run_event(Event.EVAL_AFTER_ALL)


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

    def fit(self) -> None:
        """Train until `state.max_duration` is reached."""
        state, run_event = self.state, self.engine.run_event
        schedulers, evaluators = state.schedulers, state.evaluators  # always the same list objects

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
                if schedulers:
                    self.schedulers.before_batch()
                run_event(Event.AFTER_DATALOADER)
                run_event(Event.BATCH_START)
                self.report.time()

                losses = self.train_batch()  # BEFORE_TRAIN_BATCH ... AFTER_TRAIN_BATCH, the optimizer's step
                self.report.losses(losses)
                self.report.train_metrics()
                self._advance_batch()
                if schedulers:
                    self.schedulers.after_batch()

                run_event(Event.BATCH_END)
                if evaluators:
                    self.evaluate(Event.BATCH_END)
                goes_on = self._goes_on()  # before a save, in which all ranks take part
                run_event(Event.BATCH_CHECKPOINT)
                if not goes_on or (self.ranks.may_stop_late and not self._goes_on()):
                    break
                self.preemption.leave_if_asked()

            if self.batches.epoch_is_complete():
                self.report.train_metrics()
                self._advance(state.timestamp.to_next_epoch())
                if schedulers:
                    self.schedulers.after_epoch()

                run_event(Event.EPOCH_END)
                self.evaluate(Event.EPOCH_END)
                # Called for its effect: if a rank has stopped, all stop before the save, in which all take part.
                self._goes_on()
                run_event(Event.EPOCH_CHECKPOINT)
                if self.batches.iteration_is_complete():
                    self._advance(state.timestamp.to_next_iteration())

                    run_event(Event.ITERATION_END)
                    self._goes_on()
                    run_event(Event.ITERATION_CHECKPOINT)

        # Results of the last batches may still be on the device; an error must come before FIT_END.
        self.train_batch.finish()
        self.report.epoch_and_time()
        run_event(Event.FIT_END)
        self.evaluate(Event.FIT_END)

    def _goes_on(self) -> bool:
        """Return whether to continue. If a rank has been stopped, stop all. Every rank must call this."""
        state, is_over = self.state, not has_time_left(self.state)
        stops, for_good = self.ranks.any_stops(is_over, for_good=is_over and state.stopped_duration is not None)
        if stops and not is_over:
            state.stop_training(resumable=not for_good)
        return not stops

    def _advance_batch(self) -> None:
        samples, tokens, seconds = self.ranks.total(
            self.batches.num_samples, self.batches.num_tokens, self.clock.end_batch_s()
        )
        duration = datetime.timedelta(seconds=seconds)
        self._advance(self.state.timestamp.to_next_batch(samples=samples, tokens=tokens, duration=duration))

    def _advance(self, timestamp: Timestamp) -> None:
        self.state.previous_timestamp, self.state.timestamp = self.state.timestamp, timestamp
