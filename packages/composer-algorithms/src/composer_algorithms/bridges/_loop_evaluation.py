"""Evaluation and prediction in a loop of one's own."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from composer_algorithms.bridges._loop_batch import LoopBatch
from composer_algorithms.bridges._loop_events import LoopEvents, shallow_copy
from composer_events.event import Event
from composer_models.eval_mode import model_eval_mode


class LoopEvaluation:
    """The part of `AlgorithmLoop` that does not train."""

    _events: LoopEvents

    @contextmanager
    def evaluation(self, dataloader: Iterable[Any] | None = None) -> Iterator[None]:
        """Enclose an evaluation or a save: the model is in eval mode, and holds the average where EMA keeps one.

        Args:
            dataloader: What is evaluated on, for those who look at the state.
        """
        with model_eval_mode(self._events.state.model), self._events.evaluating(dataloader):
            yield

    @contextmanager
    def prediction(self, dataloader: Iterable[Any] | None = None) -> Iterator[None]:
        """Enclose predictions: the model is in eval mode, and holds the weights being trained.

        Args:
            dataloader: What is predicted on.
        """
        events = self._events
        with model_eval_mode(events.state.model), events.reading(dataloader, "predict"):
            events.engine.run_event(Event.PREDICT_START)
            yield
            events.engine.run_event(Event.PREDICT_END)

    def eval_batch(self, *parts: Any) -> AbstractContextManager[LoopBatch]:
        """Come to the events of one batch, within `evaluation`: the block assigns its outputs."""
        return self._watched_batch(parts, "eval_")

    def predict_batch(self, *parts: Any) -> AbstractContextManager[LoopBatch]:
        """Come to the events of one batch, within `prediction`: the block assigns its outputs."""
        return self._watched_batch(parts, "predict_")

    @contextmanager
    def _watched_batch(self, parts: tuple[Any, ...], phase: str) -> Iterator[LoopBatch]:
        events = self._events
        trained, events.state.batch = events.state.batch, shallow_copy(parts[0] if len(parts) == 1 else parts)
        try:
            events.engine.run_event(f"{phase}batch_start")
            b = LoopBatch(events, phase)
            yield b
            b.finish()
            events.engine.run_event(f"{phase}batch_end")
        finally:
            events.state.batch = trained
