"""The moments of a Hugging Face Trainer for which it has callbacks."""

from typing import Any

from transformers import TrainerCallback

from composer_algorithms.bridges._hf_events import TrainerEvents
from composer_algorithms.bridges._loop_events import length_of
from composer_events.event import Event


class Moments(TrainerCallback):
    """Tells the events of a Trainer of them."""

    def __init__(self, trainer: Any, events: TrainerEvents) -> None:
        self._trainer, self._events = trainer, events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        dataloader = kwargs["train_dataloader"]
        length = length_of(dataloader)
        num_batches = None if length is None else max(-(-length // args.gradient_accumulation_steps), 1)
        self._events.begin(dataloader, num_batches)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._events.start_epoch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not (args.max_grad_norm and args.max_grad_norm > 0):  # clipping has given them their true size
            self._trainer.accelerator.unscale_gradients()
        self._events.engine.run_event(Event.AFTER_TRAIN_BATCH)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._events.end_batch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._events.is_epoch_complete or not control.should_training_stop:
            self._events.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._events.load_best()
        self._events.end_fit()
