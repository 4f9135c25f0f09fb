"""Algorithms in the Trainer of Lightning."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_events.state import State

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

    from composer_algorithms.bridges._lightning_events import FitEvents, check_algorithms_alone
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError as error:
        raise ImportError(
            f"{error}: composer_algorithms.bridges.lightning needs Lightning. Install it with "
            "`pip install 'composer-algorithms[lightning]'`."
        ) from error
    from composer_algorithms.bridges._lightning_events import FitEvents, check_algorithms_alone

__all__ = ["AlgorithmCallback"]


class AlgorithmCallback(Callback):
    """Let Lightning's Trainer run algorithms.

    Lightning's own way is not changed: it accumulates gradients, computes in mixed precision, clips, validates, saves
    and resumes as its Trainer is set up. A step of the optimizer is a batch of the algorithms, and what the dataloader
    yields a microbatch. Where `EMA` keeps an average, that is what is validated, tested, predicted with and saved as
    `state_dict`; a checkpoint that is more than weights has the key `composer_algorithms` besides.

    What to know:

    - `training_step` computes its loss by itself. Targets that algorithms change just before, as `LabelSmoothing` and
      `MixUp` do, are changed in the calls of PyTorch's losses that get the batch's targets, such as
      `F.cross_entropy(self(x), y)`. If there is no such call, training ends with an error.
    - Algorithms that compute losses of their own, such as `SelectiveBackprop`, need `loss_fn`.
    - Lightning clips gradients, if it does, after `GradientClipping`.
    - `SAM` goes neither with `accumulate_grad_batches` above 1 nor with float16.
    - The model changes before `configure_optimizers`; layers have to be there when the module is made.

    Args:
        algorithms: One or several.
        loss_fn: Called as `loss_fn(outputs, targets)`, where an algorithm asks for it with `reduction='none'`.
        input_key: Where batches hold the inputs, with which the module is called for `loss_fn`.
        target_key: Where they hold the targets.
        seed: Of the algorithms' draws. By default that of `seed_everything`, or else PyTorch's.

    Raises:
        TypeError: If one of the algorithms is none.
        ValueError: If one of them acts on an event that never comes; when training is set up, if it does not go with
            the Trainer or the module.

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
        """What algorithms see, once a Trainer is set up."""
        return self._running().state

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Let algorithms change the module, and take part in its methods.

        Raises:
            ValueError: If the Trainer or the module cannot serve the algorithms, or another callback has some too.
        """
        self._refuse_others(trainer)
        if self._events is None or self._events.module is not pl_module:
            self._events = FitEvents(trainer, pl_module, self._algorithms, **self._settings)
        self._events.attach(trainer)

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Leave the module's methods as they were."""
        if self._events is not None:
            self._events.detach()

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Let algorithms wrap the optimizer."""
        trainer.strategy.optimizers = self._running().wrap_optimizers(trainer.optimizers)

    def on_load_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Go on where the checkpoint was saved."""
        self._running().resume(checkpoint)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Come to FIT_START."""
        self._running().begin()

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Come to EPOCH_START."""
        self._running().check_accumulation()  # a callback may change it from epoch to epoch
        self._running().start_epoch()

    def on_after_backward(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Come to AFTER_BACKWARD."""
        self._running().engine.run_event(Event.AFTER_BACKWARD)

    def on_before_optimizer_step(self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Any) -> None:
        """Come to AFTER_TRAIN_BATCH."""
        self._running().end_gradients()

    def on_train_batch_end(self, trainer: "Trainer", pl_module: "LightningModule", *args: Any, **kwargs: Any) -> None:
        """Come to BATCH_END, if the optimizer has stepped."""
        self._running().end_piece()

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Come to EPOCH_END."""
        self._running().end_epoch_if_complete()

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Come to FIT_END."""
        self._running().end_fit()

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the average into the model, if there is one."""
        self._start_evaluation(trainer.val_dataloaders)

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the weights being trained back."""
        self._end_evaluation()

    def on_test_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the average into the model, if there is one."""
        self._start_evaluation(trainer.test_dataloaders)

    def on_test_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the weights being trained back."""
        self._end_evaluation()

    def on_predict_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the average into the model, if there is one."""
        self._start_evaluation(trainer.predict_dataloaders)

    def on_predict_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Put the weights being trained back."""
        self._end_evaluation()

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Put the weights being trained back, if an evaluation fails."""
        self._end_evaluation()
        if self._events is not None:
            self._events.detach()

    def _refuse_others(self, trainer: "Trainer") -> None:
        # Lightning sets the attribute from elsewhere, where a type checker does not see it.
        of_trainer: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        callbacks = [one for one in of_trainer if isinstance(one, AlgorithmCallback)]
        if len(callbacks) > 1:
            names = [", ".join(type(algorithm).__name__ for algorithm in one._algorithms) for one in callbacks]
            raise ValueError(
                f"the Trainer has {len(callbacks)} of AlgorithmCallback ({'; '.join(names)}), which know nothing of "
                f"each other's changes to the module: pass one, with all algorithms."
            )

    def _start_evaluation(self, dataloader: Any) -> None:
        self._evaluation = self._running().evaluating(dataloader)
        self._evaluation.__enter__()

    def _end_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.__exit__(None, None, None)

    def _running(self) -> "FitEvents":
        if self._events is None:
            raise RuntimeError("AlgorithmCallback has no Trainer yet: it begins with such as `trainer.fit(module)`.")
        return self._events
