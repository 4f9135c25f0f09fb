"""Algorithms in the Lightning Trainer."""

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_algorithms.bridges._loop_events import BridgedModel, DeferredTargets, LoopEvents, shallow_copy
from composer_algorithms.bridges._refusals import (
    SERVED_BY_TRAINERS,
    check_algorithms,
    computes_between,
    needs_model_loss,
    refuse,
    refuse_cut_batches,
    refuse_without_reduction,
)
from composer_algorithms.sam import SAM
from composer_events import Algorithm, Event, State, batch_get, batch_set
from composer_models.base import ComposerModel

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        f"{error}: composer_algorithms.bridges.lightning needs Lightning. Install it with "
        "`pip install 'composer-algorithms[lightning]'`."
    ) from error

__all__ = ["AlgorithmCallback"]

_KEY = "composer_algorithms"
_PRECISIONS = {"16-mixed": "amp_fp16", "bf16-mixed": "amp_bf16"}


class AlgorithmCallback(Callback):
    """Callback that runs algorithms in the Lightning Trainer.

    Lightning accumulates gradients, computes in mixed precision, clips, validates, saves and resumes as usual. An
    optimizer step is a batch of the algorithms, and each dataloader batch a microbatch. If `EMA` keeps an average, that
    is used in validation, tests and predictions and saved as `state_dict`. Checkpoints with more than weights also have
    the key `composer_algorithms`.

    Good to know:

    - `training_step` computes its loss by itself. Algorithms that change targets just before the loss, such as
      `LabelSmoothing` and `MixUp`, change them in the calls of PyTorch's losses with the batch's targets, such as
      `F.cross_entropy(self(x), y)`. Without such a call, training raises an error.
    - Algorithms that compute losses of their own, such as `SelectiveBackprop`, need `loss_fn`.
    - Lightning clips gradients, if enabled, after `GradientClipping`.
    - `SAM` does not work with `accumulate_grad_batches` above 1 or with float16.
    - Algorithms change the model before `configure_optimizers`; layers must exist once the module is constructed.

    Args:
        algorithms: One or several.
        loss_fn: Called as `loss_fn(outputs, targets)`, with `reduction='none'` where an algorithm requires it.
        input_key: Key of the inputs in a batch, with which the module is called for `loss_fn`.
        target_key: Key of the targets in a batch.
        seed: Seed of the algorithms' random numbers. By default that of `seed_everything`, or else PyTorch's.

    Raises:
        TypeError: If an object is not an algorithm.
        ValueError: If an algorithm acts on an event that never occurs; at the setup of training, if it is incompatible
            with the Trainer or the module.

    Example:
        Pass it to the Trainer:

            trainer = Trainer(callbacks=[AlgorithmCallback([MixUp(alpha=0.2), EMA(half_life="100ba")])])
    """

    def __init__(
        self,
        algorithms: Algorithm | Iterable[Algorithm],
        *,
        loss_fn: Callable[..., Any] | None = None,
        input_key: Any = 0,
        target_key: Any = 1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._algorithms = check_algorithms(algorithms, "Lightning's Trainer", SERVED_BY_TRAINERS)
        if loss_fn is None:
            refuse(
                self._algorithms,
                needs_model_loss,
                "without loss_fn",
                "it computes losses of its own, and training_step computes only that of the batch",
                "To use it, pass loss_fn to AlgorithmCallback, such as torch.nn.functional.cross_entropy.",
            )
        else:
            refuse_without_reduction(self._algorithms, "loss_fn", loss_fn)
        self._settings = {"loss_fn": loss_fn, "input_key": input_key, "target_key": target_key, "seed": seed}
        self._events: _FitEvents | None = None
        self._evaluation: Any = None

    @property
    def state(self) -> State:
        """State that the algorithms see, available once a Trainer is set up."""
        return self._running().state

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run `INIT`, on which algorithms change the module, and wrap its methods.

        Raises:
            ValueError: If the Trainer or the module is incompatible with the algorithms, or another callback has some.
        """
        # Lightning sets the attribute dynamically, which type checkers do not see.
        of_trainer: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        callbacks = [one for one in of_trainer if isinstance(one, AlgorithmCallback)]
        if len(callbacks) > 1:
            names = [", ".join(type(algorithm).__name__ for algorithm in one._algorithms) for one in callbacks]
            raise ValueError(
                f"the Trainer has {len(callbacks)} of AlgorithmCallback ({'; '.join(names)}), which do not "
                f"account for each other's changes to the module: pass one, with all algorithms."
            )
        # A second call for the same module, such as test after fit, must not run INIT again.
        if self._events is None or self._events.module is not pl_module:
            self._events = _FitEvents(trainer, pl_module, self._algorithms, **self._settings)
        self._events.attach(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the wrapped methods of the module."""
        if self._events is not None:
            self._events.detach()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the optimizers with those that algorithms may have wrapped."""
        # Here, since configure_optimizers has run, and checkpoints of optimizers are not loaded yet.
        trainer.strategy.optimizers = self._running().wrap_optimizers(trainer.optimizers)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        self._running().resume(checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run FIT_START."""
        self._running().begin()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run EPOCH_START."""
        _check_accumulation(trainer, self._running().state.algorithms)  # a callback may change it from epoch to epoch
        self._running().start_epoch()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run AFTER_BACKWARD."""
        self._running().engine.run_event(Event.AFTER_BACKWARD)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Run AFTER_TRAIN_BATCH."""
        self._running().end_gradients()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Run BATCH_END, if the optimizer has stepped."""
        self._running().end_piece()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run EPOCH_END."""
        self._running().end_epoch_if_complete()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run FIT_END."""
        self._running().end_fit()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the EMA average into the model, if there is one."""
        self._start_evaluation(trainer.val_dataloaders)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the EMA average into the model, if there is one."""
        self._start_evaluation(trainer.test_dataloaders)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the EMA average into the model, if there is one."""
        self._start_evaluation(trainer.predict_dataloaders)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights being trained."""
        self._end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the weights being trained, if an evaluation fails."""
        self._end_evaluation()
        # Lightning does not call `teardown` after an exception.
        if self._events is not None:
            self._events.detach()

    def _start_evaluation(self, dataloader: Any) -> None:
        self._evaluation = self._running().evaluating(dataloader)
        # Entered and left by hand, since a `with` block cannot span two hooks.
        self._evaluation.__enter__()

    def _end_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.__exit__(None, None, None)

    def _running(self) -> "_FitEvents":
        if self._events is None:
            raise RuntimeError("AlgorithmCallback has no Trainer yet: call `trainer.fit(module)` first.")
        return self._events


class _FitEvents(LoopEvents):
    """Events of a Trainer and a module. The arguments after the algorithms are those of `AlgorithmCallback`."""

    def __init__(
        self,
        trainer: Any,
        module: Any,
        algorithms: list[Algorithm],
        *,
        loss_fn: Callable[..., Any] | None,
        input_key: Any,
        target_key: Any,
        seed: int | None,
    ) -> None:
        _check_fit(trainer, module, algorithms)
        if seed is None:
            seed = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed() % 2**32)  # set by seed_everything
        model = module
        if loss_fn is not None and any(map(needs_model_loss, algorithms)):
            adapter = ComposerModel.from_module(module, loss_fn, input_key=input_key, target_key=target_key)
            model = BridgedModel(module, adapter.forward, adapter.loss)
        super().__init__(
            model,
            algorithms,
            device=trainer.strategy.root_device,
            rank_zero_seed=seed,
            precision=_PRECISIONS.get(trainer.precision, "fp32"),
        )
        self.module = module
        self._trainer = trainer
        self._target_key = target_key
        self._defers = any(map(computes_between, algorithms))
        self._is_first_piece = True
        self._has_stepped = False
        self._has_loss = False
        self._is_loaded = self._saves = self._is_in_epoch = False
        self._hooks: list[tuple[Any, str]] = []  # owners and names of the wrapped training hooks
        self.init()

    def attach(self, trainer: Any) -> None:
        """Wrap the methods of the module that Lightning calls."""
        self._trainer = trainer
        self.detach()
        # The last hook before training_step, in which the batch is on the device.
        data, hook = trainer.datamodule, "on_after_batch_transfer"
        holder = data if data is not None and is_overridden(hook, data) else self.module  # the one that Lightning calls
        self._wrap(self.module, "training_step", self._training_step)
        self._wrap(holder, hook, self._on_after_batch_transfer)
        if not self._saves:
            # Not undone by detach, since checkpoints may be saved after training.
            self.module.on_save_checkpoint = _around(self.module.on_save_checkpoint, self._on_save_checkpoint)
            self._saves = True
        if trainer.state.fn == "fit":
            _check_fit(trainer, self.module, self.state.algorithms)
            if trainer.global_step == 0:
                self.restart()
            self._is_first_piece, self._has_stepped, self._is_loaded, self._is_in_epoch = True, False, False, False

    def detach(self) -> None:
        """Restore the wrapped training methods."""
        for holder, name in self._hooks:
            delattr(holder, name)  # uncovers the method of the class
        self._hooks.clear()

    def begin(self) -> None:
        trainer = self._trainer
        pieces = trainer.accumulate_grad_batches
        num_batches = None if math.isinf(trainer.num_training_batches) else -(-trainer.num_training_batches // pieces)
        by_steps = trainer.max_steps is not None and trainer.max_steps >= 0
        duration = f"{trainer.max_steps}ba" if by_steps else f"{trainer.max_epochs}ep"
        self.start_fit(trainer.train_dataloader, num_batches, duration)
        if self.is_epoch_complete:  # saved after the last step of an epoch; Lightning resumes in the next one
            self.end_epoch()

    def end_gradients(self) -> None:
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        self._has_stepped = True

    def end_piece(self) -> None:
        """Finish a batch of the dataloader, and with it the step, if the optimizer has stepped."""
        self._is_first_piece, self._is_loaded = self._has_stepped, False
        if self._has_stepped:
            self._has_stepped = False
            self.end_batch()

    def start_epoch(self) -> None:
        """Begin an epoch, also a resumed one, for which Lightning runs no hook."""
        if not self._is_in_epoch:
            self._is_in_epoch = True
            super().start_epoch()

    def end_epoch_if_complete(self) -> None:
        """End an epoch, unless training stops within it."""
        if self.state.dataloader_len is None or self.is_epoch_complete:
            self._is_in_epoch = False
            self.end_epoch()

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        if _KEY in checkpoint:
            self.load_state_dict(checkpoint[_KEY])
            return
        self.resume_without_state(
            f"The checkpoint has no {_KEY!r}", epoch=checkpoint["epoch"], batch=checkpoint["global_step"]
        )

    def _wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        setattr(holder, name, _around(getattr(holder, name), wrapper))
        self._hooks.append((holder, name))

    def _on_after_batch_transfer(self, method: Callable[..., Any], batch: Any, dataloader_idx: int) -> Any:
        batch = method(batch, dataloader_idx)
        # Lightning calls the hook in evaluations, too.
        if not self._trainer.training:
            return batch
        self.start_epoch()
        batch, self._is_loaded = self.load_batch(batch), True
        return self.start_batch(batch) if self._is_first_piece else batch

    def _training_step(self, method: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        state, run_event = self.state, self.engine.run_event
        if not self._is_loaded:
            raise RuntimeError(
                "training_step received a batch that did not pass through on_after_batch_transfer, such as an "
                "iterator, so algorithms could not change it: define training_step(self, batch, batch_idx)."
            )
        if self._is_first_piece:
            run_event(Event.BEFORE_TRAIN_BATCH)
        state.batch = shallow_copy(batch)
        self._has_loss = False
        run_event(Event.BEFORE_FORWARD)
        output = method(self._deferred() if self._defers else state.batch, *args, **kwargs)
        if output is None:  # Lightning skips the batch
            return None
        loss = output["loss"] if isinstance(output, dict) else output
        if not self._has_loss:
            loss = self._loss_without_call(loss)
        state.loss = loss
        run_event(Event.BEFORE_BACKWARD)
        return {**output, "loss": state.loss} if isinstance(output, dict) else state.loss

    def _deferred(self) -> Any:
        """Return the batch with targets that intercept the loss."""
        targets = batch_get(self.state.batch, self._target_key)
        if not isinstance(targets, Tensor):
            raise TypeError(
                f"target_key={self._target_key!r} selects a {type(targets).__name__} from the batch, and algorithms "
                f"change one tensor of targets: pass the key of that tensor to AlgorithmCallback."
            )
        batch = shallow_copy(self.state.batch)
        return batch_set(batch, self._target_key, DeferredTargets.of(targets, self._compute_loss))

    def _compute_loss(self, outputs: Any, loss: Callable[[Any, Any], Any]) -> Any:
        """Compute a loss within `training_step`, with the events around it."""
        state, run_event = self.state, self.engine.run_event
        state.outputs = outputs
        run_event(Event.AFTER_FORWARD)
        run_event(Event.BEFORE_LOSS)
        state.loss = loss(state.outputs, batch_get(state.batch, self._target_key))
        run_event(Event.AFTER_LOSS)
        self._has_loss = True
        return state.loss

    def _loss_without_call(self, loss: Tensor) -> Tensor:
        # Without an intercepted loss, these algorithms would have been silently skipped.
        if self._defers:
            names = ", ".join(type(one).__name__ for one in self.state.algorithms if computes_between(one))
            raise RuntimeError(
                f"training_step called no PyTorch loss with the batch's targets, so {names} could not act: call a loss "
                f"such as F.cross_entropy(outputs, targets) with the unchanged batch item of "
                f"target_key={self._target_key!r}, or leave {names} out."
            )
        for event in (Event.AFTER_FORWARD, Event.BEFORE_LOSS):
            self.engine.run_event(event)
        self.state.loss = loss
        self.engine.run_event(Event.AFTER_LOSS)
        return self.state.loss

    def _on_save_checkpoint(self, method: Callable[..., Any], checkpoint: dict[str, Any]) -> None:
        # Deep copies, since the model gets its own weights back before the checkpoint is written.
        with self.saving():
            weights = self._trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {name: copy.deepcopy(value) for name, value in weights.items()}
            if "optimizer_states" in checkpoint:  # more than weights
                checkpoint[_KEY] = copy.deepcopy(self.state_dict())
        method(checkpoint)


def _around(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    # Name and signature stay: Lightning derives the arguments from them, and whether a hook is overridden.
    return functools.wraps(method)(functools.partial(wrapper, method))


def _check_fit(trainer: Any, module: Any, algorithms: Sequence[Algorithm]) -> None:
    """Reject setups of the Trainer or the module that do not work with the algorithms."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization is False: the module performs its own optimizer steps, "
            f"and algorithms do not see its losses. Use automatic optimization, or AlgorithmLoop of "
            f"composer_algorithms.bridges.loop in a custom loop."
        )
    if not isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)):
        raise ValueError(
            f"strategy is a {type(trainer.strategy).__name__}, under which weights and optimizers are not the module's "
            f"own: algorithms support one device or DDP. For sharded models use the Trainer of composer-suite."
        )
    if is_overridden("configure_model", module):
        raise ValueError(
            f"{type(module).__name__}.configure_model creates layers after algorithms have changed the module: create "
            f"them in __init__."
        )
    if getattr(module, "_compiler_ctx", None) is not None and any(map(computes_between, algorithms)):
        names = ", ".join(type(algorithm).__name__ for algorithm in algorithms if computes_between(algorithm))
        raise ValueError(
            f"{names} acts within training_step, and torch.compile has compiled the whole {type(module).__name__}: "
            f"compile the network in it instead."
        )
    has_steps = trainer.max_steps is not None and trainer.max_steps >= 0  # -1 stands for no limit, also of epochs
    if trainer.state.fn == "fit" and not has_steps and (trainer.max_epochs is None or trainer.max_epochs < 0):
        raise ValueError(
            f"max_epochs={trainer.max_epochs!r} and max_steps={trainer.max_steps!r} define no end of "
            f"training, and algorithms depend on its completed fraction: pass one of them."
        )
    _check_accumulation(trainer, algorithms)


def _check_accumulation(trainer: Any, algorithms: Sequence[Algorithm]) -> None:
    """Reject algorithms that are incompatible with gradient accumulation or with float16."""
    pieces, uses_sam = trainer.accumulate_grad_batches, lambda one: isinstance(one, SAM)
    refuse_cut_batches(algorithms, "accumulate_grad_batches", pieces)
    if pieces > 1:
        why = "its second pass would see only the last of these batches"
        refuse(algorithms, uses_sam, f"with accumulate_grad_batches={pieces}", why, "Pass accumulate_grad_batches=1.")
    if trainer.precision in ("16-mixed", 16):
        why = "the scaler of its gradients steps without a closure"
        refuse(algorithms, uses_sam, f"with precision={trainer.precision!r}", why, "Use precision='bf16-mixed'.")
