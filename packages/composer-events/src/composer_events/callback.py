"""Base class of callbacks, which observe training and act on events."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any, ClassVar, Final

from composer_events.event import Event
from composer_events.serializable import Serializable

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["Callback"]

# A table, because reading an Enum member's `value`, a Python property, took a third of the time of a callback's call.
_METHODS: Final = {event: event.value for event in Event}


class Callback(Serializable, ABC):
    """Base class of callbacks. It has a method for each event, which does nothing unless a subclass overrides it.

    The engine determines which callback overrides which method when the list of callbacks changes and at the events
    that begin something (`INIT`, `FIT_START`, `EVAL_STANDALONE_START`, `PREDICT_START`), and calls only those. To see
    every event, override `run_event`. A subclass need not call `super().__init__()`.

    Attributes:
        saves_checkpoints: Whether the callback is the `CheckpointSaver` of a run, which never stops the training.

    Example:
        >>> class StopAtNaN(Callback):
        ...     def after_loss(self, state, logger):
        ...         if state.loss != state.loss:
        ...             raise RuntimeError("The loss is not a number.")
    """

    saves_checkpoints: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs  # accepted, because a subclass may pass on any arguments

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Call the method named after the event. Override it to handle every event in one place.

        Args:
            event: The event.
            state: The training state.
            logger: Logs metrics and other results.
        """
        return getattr(self, _METHODS[event])(state, logger)

    def init(self, state: State, logger: Logger) -> None:
        """Act when the Trainer is constructed: model and optimizers exist, nothing is wrapped or loaded."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Act before a checkpoint is searched for."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Act after the checkpoint, if any, is loaded."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Act when a call of `fit` begins."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Act when an iteration begins."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Act when an epoch begins."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Act before a batch is fetched."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Act on the fetched `state.batch`."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Act when the work on a batch begins."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Act before the gradients of a batch are computed."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """Act before the forward pass of a microbatch."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """Act on `state.outputs` of a microbatch."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """Act before the loss of a microbatch is computed."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """Act on `state.loss` of a microbatch."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Act before the backward pass of a microbatch."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """Act after the backward pass of a microbatch."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Act on the complete gradients of a batch, before the optimizer steps."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Act after the optimizer has stepped; the timestamp counts the batch."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Act after the evaluation that was due after a batch."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Act when an epoch ends; the timestamp counts it."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Act after the evaluation that was due after an epoch."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Act when an iteration ends; the timestamp counts it."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Act after `iteration_end`."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Act when a call of `fit` ends."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Act before the evaluators that are due inside `fit`."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """Act when an evaluator begins."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Act when the work on an evaluation batch begins."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Act before the forward pass of an evaluation microbatch."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Act on `state.outputs` of an evaluation microbatch."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Act when the work on an evaluation batch ends."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """Act when an evaluator ends; its metrics are computed."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Act after the evaluators that were due inside `fit`."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Act when a call of `Trainer.eval` begins."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Act when a call of `Trainer.eval` ends."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """Act when a call of `Trainer.predict` begins."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """Act when the work on a prediction batch begins."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """Act before the forward pass of a prediction batch."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """Act on `state.outputs` of a prediction batch."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """Act when the work on a prediction batch ends."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """Act when a call of `Trainer.predict` ends."""

    def close(self, state: State, logger: Logger) -> None:
        """Flush buffers and release resources. May be called more than once.

        The engine calls it when training is over, after an exception, and when the interpreter exits.
        """

    def post_close(self) -> None:
        """Finish after `close` of every callback, to process what others wrote there. May be called more than once."""
