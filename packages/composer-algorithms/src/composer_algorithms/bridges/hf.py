"""Algorithms in the Hugging Face Trainer."""

import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_algorithms.bridges._loop_events import BridgedModel, LoopEvents, length_of, needs_closure, shallow_copy
from composer_algorithms.bridges._refusals import (
    SERVED_BY_TRAINERS,
    check_algorithms,
    computes_between,
    needs_model_loss,
    refuse,
    refuse_cut_batches,
    refuse_without_reduction,
)
from composer_algorithms.ema import EMA
from composer_algorithms.gradient_clipping import GradientClipping
from composer_algorithms.layer_freezing import LayerFreezing
from composer_algorithms.sam import SAM, Draws
from composer_algorithms.seq_length_warmup import SeqLengthWarmup
from composer_algorithms.swa import SWA
from composer_events import Algorithm, Event, State
from composer_time import Time, TimeUnit

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        f"{error}: composer_algorithms.bridges.hf needs transformers and Accelerate. Install "
        "them with `pip install 'composer-algorithms[transformers,accelerate]'`."
    ) from error
if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # a mixin: the Trainer is another base of the final class

__all__ = ["AlgorithmTrainerMixin"]

_FILE_NAME = "composer_algorithms.pt"


class AlgorithmTrainerMixin(Trainer):
    """Mixin that runs algorithms in a Hugging Face Trainer; put it before the Trainer among the bases of a class.

    The Trainer accumulates gradients, computes in mixed precision, clips, evaluates, saves and resumes as usual. An
    optimizer step is a batch of the algorithms, and each dataloader batch a microbatch. If `EMA` keeps an average, that
    is used for evaluation and prediction and saved as the model. Each checkpoint folder has a file
    `composer_algorithms.pt` with the state that algorithms need to resume.

    Good to know:

    - The model computes its loss within its forward pass. Algorithms that act on outputs or targets in between, such as
      `LabelSmoothing`, or on losses need the Trainer's `compute_loss_func(outputs, labels, num_items_in_batch=...)`.
    - Batches are dicts: `MixUp(input_key="pixel_values", target_key="labels")`.
    - The Trainer itself clips gradients, by `max_grad_norm=1.0` unless that is set to 0, before `GradientClipping`.
    - `SAM` runs a second pass over all microbatches of a step. It does not work with float16.

    Args:
        *args: Positional arguments of the Trainer.
        algorithms: One or several.
        **kwargs: Keyword arguments of the Trainer.

    Attributes:
        algorithm_state: State that the algorithms see.

    Raises:
        TypeError: If an object is not an algorithm.
        ValueError: If an algorithm is incompatible with the Trainer's setup: it acts on an event that never occurs, or
            would have no effect.

    Example:
        Make a class and give it algorithms:

            class AlgorithmTrainer(AlgorithmTrainerMixin, Trainer):
                pass

            trainer = AlgorithmTrainer(model, args, train_dataset=dataset, algorithms=[EMA(half_life="100ba")])
    """

    _algorithm_events: "_TrainerEvents | Any" = None  # until the Trainer's constructor has run

    def __init__(self, *args: Any, algorithms: Algorithm | list[Algorithm] | tuple[Algorithm, ...] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._algorithm_events = _TrainerEvents(self, algorithms)
        self.add_callback(self._algorithm_events)

    @property
    def algorithm_state(self) -> State:
        """State that the algorithms see."""
        return self._algorithm_events.state

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, which algorithms may wrap."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._algorithm_events is not None:
            optimizer = self.optimizer = self._algorithm_events.wrap_optimizer(optimizer)
        return optimizer

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or resume training together with the algorithms."""
        if resume_from_checkpoint is True:  # without a checkpoint True stays, and the Trainer raises
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._algorithm_events.checkpoint = resume_from_checkpoint or None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Read the batches of a step, changed by algorithms; tokens are counted afterwards."""
        return super().get_batch_samples(self._algorithm_events.read(epoch_iterator), *args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """Compute the gradients of a microbatch."""
        with self._algorithm_events.microbatch(model, inputs, num_items_in_batch) as changed:
            return super().training_step(model, changed, num_items_in_batch, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the loss, in training with the events around it."""
        events = self._algorithm_events
        if events is None or not events.is_in_step:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        loss, outputs = super().compute_loss(
            model, events.start_forward(inputs), return_outputs=True, num_items_in_batch=num_items_in_batch, **kwargs
        )
        loss = events.end_loss(outputs, loss)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict, with the EMA average if there is one."""
        with self._algorithm_events.evaluating(dataloader):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, with EMA its average, and in checkpoints the state of the algorithms."""
        with self._algorithm_events.saving():
            super().save_model(output_dir, _internal_call=_internal_call)
            # Within `saving`, since the state of EMA must hold the set of weights that the model does not.
            if _internal_call and self.args.should_save:
                self._algorithm_events.save(str(output_dir or self.args.output_dir))


class _TrainerEvents(LoopEvents, TrainerCallback):
    """Events of a Hugging Face Trainer, of which this is a callback as well.

    Attributes:
        checkpoint: Checkpoint that training resumes from.
        is_in_step: Whether a loss computed now is trained on.
    """

    def __init__(self, trainer: Any, algorithms: Any) -> None:
        algorithms = check_algorithms(
            algorithms, "the Hugging Face Trainer", SERVED_BY_TRAINERS | {Event.BEFORE_DATALOADER}
        )
        args = trainer.args
        _check_trainer(trainer, algorithms)
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss_func
        model = trainer.model
        if any(map(needs_model_loss, algorithms)):
            model = BridgedModel(model, lambda batch: trainer.model(**batch), self._loss_of)
        super().__init__(
            model,
            algorithms,
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
        dataloader, done = kwargs["train_dataloader"], self._trainer.state
        length = length_of(dataloader)
        # A batch of the algorithms is an optimizer step; the last one of an epoch may have fewer microbatches.
        num_update_steps = None if length is None else max(-(-length // args.gradient_accumulation_steps), 1)
        self.restart()
        if self.checkpoint:
            self._resume(Path(str(self.checkpoint)), num_update_steps)
        epochs = args.num_train_epochs
        by_epochs = args.max_steps <= 0 and epochs == int(epochs)
        duration = Time(int(epochs), TimeUnit.EPOCH) if by_epochs else Time(done.max_steps, TimeUnit.BATCH)
        self.start_fit(dataloader, num_update_steps, duration)
        if self.is_epoch_complete:  # saved after the last step of an epoch; the Trainer resumes in the next one
            self.end_epoch()

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
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
                    self._draws, self._loss = Draws({self._trainer.args.device}, self.state.algorithms), 0.0
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
        torch.save(self.state_dict(), Path(folder, _FILE_NAME))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start_epoch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not (args.max_grad_norm and args.max_grad_norm > 0):  # clipping has already unscaled them
            self._trainer.accelerator.unscale_gradients()
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end_batch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End an epoch; training may stop in the middle of one, which is not complete then."""
        if self.is_epoch_complete or not control.should_training_stop:
            self.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End training, with the state that the algorithms had in the best checkpoint if the Trainer has loaded it."""
        best = self._trainer.state.best_model_checkpoint
        if self._trainer.args.load_best_model_at_end and best and Path(best, _FILE_NAME).exists():
            time = self.state.timestamp
            self._load(Path(best))
            self.state.timestamp = time  # only the state of the algorithms goes back, not the time
        self.end_fit()

    def _resume(self, folder: Path, num_update_steps: int | None) -> None:
        if (folder / _FILE_NAME).exists():
            self._load(folder)
            return
        step = self._trainer.state.global_step
        # With an unknown length all steps count as steps of the first epoch.
        epoch, batch_in_epoch = divmod(step, num_update_steps or step + 1)
        self.resume_without_state(
            f"{folder} has no {_FILE_NAME}", epoch=epoch, batch=step, batch_in_epoch=batch_in_epoch
        )

    def _load(self, folder: Path) -> None:
        self.load_state_dict(torch.load(folder / _FILE_NAME, map_location="cpu", weights_only=True))

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


def _check_trainer(trainer: Any, algorithms: Sequence[Algorithm]) -> None:
    """Reject setups in which algorithms would have no effect, or a wrong one."""
    args, compute_loss = trainer.args, trainer.compute_loss_func
    if trainer.model_init is not None:
        raise ValueError(
            "model_init creates a new model in each call of train(), which algorithms have not changed: pass model=."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True restarts training in the middle of a run of the algorithms: give "
            "per_device_train_batch_size as a number."
        )
    refuse_cut_batches(algorithms, "gradient_accumulation_steps", args.gradient_accumulation_steps)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        refuse(
            algorithms,
            lambda one: isinstance(one, (EMA, SWA, SAM, GradientClipping, LayerFreezing)),
            f"under the Trainer's {'DeepSpeed' if trainer.is_deepspeed_enabled else 'FSDP'}",
            "weights, gradients and the optimizer are not the model's own there",
            "Leave it out, or use the Trainer of composer-suite.",
        )
    if args.fp16:
        why = "the scaler of its gradients steps without a closure"
        refuse(algorithms, lambda one: isinstance(one, SAM), "with fp16=True", why, "Use bf16=True.")
    if args.ddp_find_unused_parameters is False and args.world_size > 1:
        refuse(
            algorithms,
            lambda one: one.find_unused_parameters,
            "with ddp_find_unused_parameters=False",
            "it leaves parameters without gradients",
            "Set it to True.",
        )
    if compute_loss is not None:
        refuse_without_reduction(algorithms, "compute_loss_func", compute_loss)
        return
    refuse(
        algorithms,
        lambda one: computes_between(one) or (needs_model_loss(one) and not isinstance(one, SeqLengthWarmup)),
        "without compute_loss_func",
        "it acts between the forward pass and the loss, or computes a loss of its own, and the model computes its loss "
        "within its forward pass",
        "Pass compute_loss_func to the Trainer: a function (outputs, labels, num_items_in_batch=None) such as one that "
        "returns F.cross_entropy(outputs['logits'], labels).",
    )
