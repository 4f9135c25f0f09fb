"""Mapping from the steps of a Hugging Face Trainer to events."""

import copy
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from composer_algorithms.bridges._loop_events import BridgedModel, LoopEvents, length_of, needs_closure, shallow_copy
from composer_algorithms.bridges._refusals import (
    SERVED_BY_TRAINERS,
    check_algorithms,
    computes_between,
    needs_model_loss,
    refuse,
    refuse_cut_batches,
    refuse_graphs,
    refuse_without_reduction,
)
from composer_algorithms.ema import EMA
from composer_algorithms.gradient_clipping import GradientClipping
from composer_algorithms.layer_freezing import LayerFreezing
from composer_algorithms.sam import (
    SAM,
    _Draws,  # SAM itself would record them only after the first pass, which precedes its step
)
from composer_algorithms.seq_length_warmup import SeqLengthWarmup
from composer_algorithms.swa import SWA
from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_time import Time, TimeUnit

FILE_NAME = "composer_algorithms.pt"


class TrainerEvents(LoopEvents, TrainerCallback):
    """Events of a Hugging Face Trainer, of which this is a callback as well.

    Attributes:
        checkpoint: Checkpoint that training resumes from.
        is_in_step: Whether a loss computed now is trained on.
    """

    def __init__(self, trainer: Any, algorithms: Any) -> None:
        algorithms = check_algorithms(algorithms)
        args = trainer.args
        check_trainer(trainer, algorithms)
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss_func
        model = trainer.model
        if any(map(needs_model_loss, algorithms)):
            model = BridgedModel(model, lambda batch: trainer.model(**batch), self._loss_of)
        super().__init__(
            model,
            algorithms,
            bridge="the Hugging Face Trainer",
            served=SERVED_BY_TRAINERS | {Event.BEFORE_DATALOADER},
            device=args.device,
            rank_zero_seed=args.seed,
            optimizers=trainer.optimizer,
            precision="amp_bf16" if args.bf16 else "amp_fp16" if args.fp16 else "fp32",
            device_train_microbatch_size=args.per_device_train_batch_size,
        )
        self.checkpoint: str | bool | None = None
        self.is_in_step = False
        self._outputs: Any = None
        self._has_loss = self._has_outputs = False
        self._microbatches: list[tuple[Any, ...]] = []  # arguments of `training_step` in this step
        self._is_second_look = False
        self._draws: Any = None
        self._loss: Any = None
        if self._compute_loss is not None:
            trainer.compute_loss_func = self._loss_between_events
        self.init()

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer that the Trainer steps with; one that it has already prepared stays unchanged."""
        bare = getattr(optimizer, "optimizer", optimizer)
        if bare is not optimizer or any(bare is own for own in self.state.optimizers if needs_closure(own)):
            return optimizer
        (wrapped,) = self.wrap_optimizers([optimizer])
        if needs_closure(wrapped):
            # The Trainer steps without a closure, and a hook is torch's way to add an argument.
            wrapped.register_step_pre_hook(lambda _, args, kwargs: (args[:1], {"closure": self._closure()}))
        return wrapped

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin training, or resume it."""
        dataloader, done = kwargs["train_dataloader"], self._trainer.state
        length = length_of(dataloader)
        # A batch of the algorithms is an optimizer step; the last one of an epoch may have fewer microbatches.
        num_update_steps = None if length is None else max(-(-length // args.gradient_accumulation_steps), 1)
        if self.checkpoint:
            self._resume(Path(str(self.checkpoint)), num_update_steps)
        else:
            self.restart()
        epochs = args.num_train_epochs
        by_epochs = args.max_steps <= 0 and epochs == int(epochs)
        duration = Time(int(epochs), TimeUnit.EPOCH) if by_epochs else Time(done.max_steps, TimeUnit.BATCH)
        self.start_fit(dataloader, num_update_steps, duration)
        if self.is_epoch_complete:  # saved after the last step of an epoch; the Trainer resumes in the next one
            self.end_epoch()

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a step as changed by the algorithms."""
        self._microbatches.clear()
        while True:
            self.engine.run_event(Event.BEFORE_DATALOADER)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield self.load_batch(batch)

    @contextmanager
    def microbatch(self, model: Any, inputs: Any, num_items: Any) -> Iterator[Any]:
        """Run the events around forward and backward of a microbatch; yields the microbatch after changes."""
        # The second pass of SAM repeats recorded microbatches, whose batch events have run already.
        if not self._is_second_look:
            if not self._microbatches:
                inputs = self.start_batch(inputs)
                if any(map(needs_closure, self.state.optimizers)):
                    self._draws, self._loss = _Draws({self._trainer.args.device}, self.state.algorithms), 0.0
                self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
            self._microbatches.append((model, inputs, num_items))
        self.is_in_step, self._has_loss = True, False
        try:
            yield shallow_copy(inputs)  # kept in self._microbatches for a second pass
        finally:
            self.is_in_step = False
        if not self._has_loss:
            raise RuntimeError(
                "training_step computed no loss by compute_loss of AlgorithmTrainerMixin, so algorithms did not act: "
                "put the class that overrides compute_loss after the mixin, as in `class MyTrainer("
                "AlgorithmTrainerMixin, TrainerWithMyLoss)`."
            )
        self.engine.run_event(Event.AFTER_BACKWARD)

    def start_forward(self, inputs: Any) -> Any:
        """Return the microbatch for the model, after `BEFORE_FORWARD`."""
        self.state.batch = inputs
        self._has_outputs = False
        self.engine.run_event(Event.BEFORE_FORWARD)
        return shallow_copy(self.state.batch)  # the Trainer removes the labels

    def end_loss(self, outputs: Any, loss: Tensor) -> Tensor:
        """Return the loss for the backward pass, after the events between loss and backward."""
        # The model computed its loss in its forward pass, so the events before the loss have not run yet.
        if not self._has_outputs:
            self._start_loss(outputs)
        self.state.loss = loss
        self.engine.run_event(Event.AFTER_LOSS)
        self.engine.run_event(Event.BEFORE_BACKWARD)
        self._has_loss = True
        self._loss = self.state.loss.detach()
        return self.state.loss

    def save(self, folder: str) -> None:
        """Write the state that the algorithms need to resume."""
        torch.save(self.state_dict(), Path(folder, FILE_NAME))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin an epoch."""
        self.start_epoch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run the event after the gradients of a step."""
        if not (args.max_grad_norm and args.max_grad_norm > 0):  # clipping has already unscaled them
            self._trainer.accelerator.unscale_gradients()
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step."""
        self.end_batch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End an epoch; training may stop in the middle of one, which is not complete then."""
        if self.is_epoch_complete or not control.should_training_stop:
            self.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End training, with the state that the algorithms had in the best checkpoint if the Trainer has loaded it."""
        best = self._trainer.state.best_model_checkpoint
        if self._trainer.args.load_best_model_at_end and best and Path(best, FILE_NAME).exists():
            time = self.state.timestamp
            self.load_state_dict(_read(Path(best, FILE_NAME)))
            self.state.timestamp = time  # only the state of the algorithms goes back, not the time
        self.end_fit()

    def _resume(self, folder: Path, num_update_steps: int | None) -> None:
        if (folder / FILE_NAME).exists():
            self.restart()
            self.load_state_dict(_read(folder / FILE_NAME))
            return
        warnings.warn(
            f"{folder} has no {FILE_NAME}: it was saved without algorithms, so they start from scratch, at the time of "
            f"the Trainer.",
            stacklevel=2,
        )
        step = self._trainer.state.global_step
        # With an unknown length all steps count as steps of the first epoch.
        epoch, batch_in_epoch = divmod(step, num_update_steps or step + 1)
        time = {"epoch": epoch, "batch": step, "batch_in_epoch": batch_in_epoch}
        self.restart()
        self.state.timestamp = self.state.timestamp.copy(**time)

    def _loss_between_events(self, outputs: Any, labels: Any, **kwargs: Any) -> Any:
        if self.is_in_step:
            self._start_loss(outputs)
            labels = self.state.batch.get("labels", labels)
        return self._compute_loss(outputs, labels, **kwargs)

    def _start_loss(self, outputs: Any) -> None:
        state, self._outputs, self._has_outputs = self.state, outputs, True
        has_logits = isinstance(outputs, MutableMapping) and "logits" in outputs
        state.outputs = outputs["logits"] if has_logits else outputs
        self.engine.run_event(Event.AFTER_FORWARD)
        if has_logits and state.outputs is not outputs["logits"]:
            outputs["logits"] = state.outputs
        self.engine.run_event(Event.BEFORE_LOSS)

    def _loss_of(self, outputs: Any, batch: Any, **kwargs: Any) -> Any:
        """Compute a loss on behalf of an algorithm."""
        if self._compute_loss is None:
            return outputs["loss"] if isinstance(outputs, MutableMapping) else outputs[0]
        # Algorithms see the logits only; compute_loss_func takes the model's whole output.
        if isinstance(outputs, Tensor) and isinstance(self._outputs, MutableMapping):
            whole: Any = copy.copy(self._outputs)
            whole["logits"] = outputs
            outputs = whole
        if self.is_in_step:
            kwargs = {"num_items_in_batch": self._microbatches[-1][2], **kwargs}
        return self._compute_loss(outputs, batch.get("labels"), **kwargs)

    def _closure(self) -> Callable[[], Tensor]:
        """Return a closure that first returns the current loss, and repeats the step's passes in later calls."""
        num_calls = 0

        def closure() -> Tensor:
            nonlocal num_calls
            num_calls += 1  # the gradients of the first pass exist already when the optimizer steps
            if num_calls > 1:
                self._look_again()
            return self._loss

        return closure

    def _look_again(self) -> None:
        trainer, limit = self._trainer, self._trainer.args.max_grad_norm
        self._draws.repeat()  # the second pass must see the same dropout masks
        self._is_second_look = True
        try:
            self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
            for model, inputs, num_items in self._microbatches:
                trainer.training_step(model, inputs, num_items)
        finally:
            self._is_second_look = False
        # The Trainer clips before the step, that is, in the first pass only.
        if limit is not None and limit > 0:
            trainer.accelerator.clip_grad_norm_(self._microbatches[-1][0].parameters(), limit)
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def check_trainer(trainer: Any, algorithms: Sequence[Algorithm]) -> None:
    """Reject algorithms that would have no effect, or a wrong one."""
    args = trainer.args
    if trainer.model_init is not None:
        raise ValueError(
            "model_init creates a new model in each call of train(), which algorithms have not changed: pass model=."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True restarts training in the middle of a run of the algorithms: give "
            "per_device_train_batch_size as a number."
        )
    refuse_graphs(algorithms, "the Hugging Face Trainer")
    refuse_cut_batches(algorithms, "gradient_accumulation_steps", args.gradient_accumulation_steps)
    for is_enabled, engine in ((trainer.is_deepspeed_enabled, "DeepSpeed"), (trainer.is_fsdp_enabled, "FSDP")):
        if is_enabled:
            refuse(
                algorithms,
                (EMA, SWA, SAM, GradientClipping, LayerFreezing),
                f"under the Trainer's {engine}",
                "weights, gradients and the optimizer are not the model's own there",
                "Leave it out, or use the Trainer of composer-suite.",
            )
    if args.fp16:
        refuse(
            algorithms,
            (SAM,),
            "with fp16=True",
            "the scaler of its gradients steps without a closure",
            "Use bf16=True, or leave out one of the two.",
        )
    if args.ddp_find_unused_parameters is False and args.world_size > 1:
        for algorithm in algorithms:
            if algorithm.find_unused_parameters:
                raise ValueError(
                    f"{algorithm!r} leaves parameters without gradients, which ddp_find_unused_parameters=False does "
                    f"not expect: set it to True."
                )
    _check_losses(trainer.compute_loss_func, algorithms)


def _check_losses(compute_loss: Any, algorithms: Sequence[Algorithm]) -> None:
    if compute_loss is None:
        for algorithm in algorithms:
            asks = needs_model_loss(algorithm) and not isinstance(algorithm, SeqLengthWarmup)
            if asks or computes_between(algorithm):
                raise ValueError(
                    f"{algorithm!r} acts between the forward pass and the loss, or computes a loss of its own, and the "
                    f"model computes its loss within its forward pass. Pass compute_loss_func to the Trainer: a "
                    f"function (outputs, labels, num_items_in_batch=None) such as one that returns "
                    f"F.cross_entropy(outputs['logits'], labels)."
                )
    else:
        refuse_without_reduction(algorithms, "compute_loss_func", compute_loss)
