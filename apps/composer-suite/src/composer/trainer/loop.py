"""The training loop: all events in order, with the calls between them.

Algorithms and callbacks act on the events. The table in `composer_events.event` describes when each event runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from composer.trainer._data import TrainBatches
from composer.trainer._evaluation import Evaluation, EvaluationBatches
from composer.trainer._fit_settings import SchedulerSteps
from composer.trainer._progress import Clock, Progress
from composer.trainer._report import Report
from composer.trainer._shutdown import Preemption
from composer.trainer._step import BatchTrainer
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.state import State


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
    progress: Progress
    preemption: Preemption

    def fit(self) -> None:
        """Train until `state.max_duration` is reached."""
        state, run_event, progress = self.state, self.engine.run_event, self.progress
        schedulers, evaluators = state.schedulers, state.evaluators  # always the same list objects

        self.report.algorithms()
        run_event(Event.FIT_START)
        self.batches.resume()
        state.model.train()
        while progress.goes_on():
            # A resumed run may begin in the middle of an epoch, whose start events have run before.
            if state.timestamp.epoch_in_iteration == 0 and state.timestamp.batch_in_epoch == 0:
                run_event(Event.ITERATION_START)
            if state.timestamp.batch_in_epoch == 0:
                self.batches.begin_epoch()
                run_event(Event.EPOCH_START)
                self.report.epoch()

            progress.clock.start_batch()
            for state.batch in self.batches:
                progress.start_batch(self.batches.num_samples, self.batches.num_tokens)
                if schedulers:
                    self.schedulers.before_batch()
                run_event(Event.AFTER_DATALOADER)
                run_event(Event.BATCH_START)
                self.report.time()

                losses = self.train_batch()  # BEFORE_TRAIN_BATCH ... AFTER_TRAIN_BATCH, the optimizer's step
                self.report.batch(losses)
                progress.end_batch()
                if schedulers:
                    self.schedulers.after_batch()

                run_event(Event.BATCH_END)
                has_evaluated = bool(evaluators) and self.evaluate(Event.BATCH_END)
                goes_on = progress.goes_on(now=has_evaluated)  # before a save, in which all ranks take part
                if not goes_on:
                    progress.advance_clock()
                progress.run_checkpoint(Event.BATCH_CHECKPOINT)
                if not goes_on or not progress.goes_on_after_save():
                    break
                self.preemption.leave_if_asked()

            if self.batches.epoch_is_complete():
                self.report.metrics()
                progress.advance_clock()
                progress.advance(state.timestamp.to_next_epoch())
                if schedulers:
                    self.schedulers.after_epoch()

                run_event(Event.EPOCH_END)
                self.evaluate(Event.EPOCH_END)
                # Called for its effect: if a rank has stopped, all stop before the save, in which all take part.
                progress.goes_on()
                progress.run_checkpoint(Event.EPOCH_CHECKPOINT)
                if self.batches.iteration_is_complete():
                    progress.advance(state.timestamp.to_next_iteration())

                    run_event(Event.ITERATION_END)
                    progress.goes_on()
                    progress.run_checkpoint(Event.ITERATION_CHECKPOINT)

        # Results of the last batches may still be on the device; an error must come before FIT_END.
        self.train_batch.finish()
        self.report.epoch_and_time()
        run_event(Event.FIT_END)
        self.evaluate(Event.FIT_END)
