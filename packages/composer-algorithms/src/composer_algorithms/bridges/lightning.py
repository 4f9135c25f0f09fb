"""Algorithms in the Lightning Trainer."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_events.state import State

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

    from composer_algorithms.bridges._lightning_events import FitEvents, check_accumulation, check_algorithms_alone
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError as error:
        raise ImportError(
            f"{error}: composer_algorithms.bridges.lightning needs Lightning. Install it with "
            "`pip install 'composer-algorithms[lightning]'`."
        ) from error
    from composer_algorithms.bridges._lightning_events import FitEvents, check_accumulation, check_algorithms_alone

__all__ = ["AlgorithmCallback"]


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
        self._algorithms = check_algorithms_alone(algorithms, loss_fn)
        self._settings = {"loss_fn": loss_fn, "input_key": input_key, "target_key": target_key, "seed": seed}
        self._events: FitEvents | None = None
        self._evaluation: Any = None

    @property
    def state(self) -> State:
        """State that the algorithms see, available once a Trainer is set up."""
        return self._running().state

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
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
            self._events = FitEvents(trainer, pl_module, self._algorithms, **self._settings)
        self._events.attach(trainer)

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Restore the wrapped methods of the module."""
        if self._events is not None:
            self._events.detach()

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Replace the optimizers with those that algorithms may have wrapped."""
        # Here, since configure_optimizers has run, and checkpoints of optimizers are not loaded yet.
        trainer.strategy.optimizers = self._running().wrap_optimizers(trainer.optimizers)

    def on_load_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        self._running().resume(checkpoint)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Run FIT_START."""
        self._running().begin()

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Run EPOCH_START."""
        check_accumulation(trainer, self._running().state.algorithms)  # a callback may change it from epoch to epoch
        self._running().start_epoch()

    def on_after_backward(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Run AFTER_BACKWARD."""
        self._running().engine.run_event(Event.AFTER_BACKWARD)

    def on_before_optimizer_step(self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Any) -> None:
        """Run AFTER_TRAIN_BATCH."""
        self._running().end_gradients()

    def on_train_batch_end(self, trainer: "Trainer", pl_module: "LightningModule", *args: Any, **kwargs: Any) -> None:
        """Run BATCH_END, if the optimizer has stepped."""
        self._running().end_piece()

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Run EPOCH_END."""
        self._running().end_epoch_if_complete()

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Run FIT_END."""
        self._running().end_fit()

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the EMA average into the model, if there is one."""
        self._start_evaluation(trainer.val_dataloaders)

    def on_test_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the EMA average into the model, if there is one."""
        self._start_evaluation(trainer.test_dataloaders)

    def on_predict_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the EMA average into the model, if there is one."""
        self._start_evaluation(trainer.predict_dataloaders)

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Restore the weights being trained."""
        self._end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
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

    def _running(self) -> "FitEvents":
        if self._events is None:
            raise RuntimeError("AlgorithmCallback has no Trainer yet: call `trainer.fit(module)` first.")
        return self._events
