"""Algorithms in the Hugging Face Trainer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer_events.algorithm import Algorithm
from composer_events.state import State

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint

    from composer_algorithms.bridges._hf_events import TrainerEvents
else:
    try:
        from transformers.trainer_utils import get_last_checkpoint
    except ImportError as error:
        raise ImportError(
            f"{error}: composer_algorithms.bridges.hf needs transformers and Accelerate. Install "
            "them with `pip install 'composer-algorithms[transformers,accelerate]'`."
        ) from error
    from composer_algorithms.bridges._hf_events import TrainerEvents

    Trainer = object  # a mixin: the Trainer is another base of the final class

__all__ = ["AlgorithmTrainerMixin"]


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

    _algorithm_events: "TrainerEvents | None" = None  # until the Trainer's constructor has run

    def __init__(self, *args: Any, algorithms: Algorithm | list[Algorithm] | tuple[Algorithm, ...] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._algorithm_events = TrainerEvents(self, algorithms)
        self.add_callback(self._algorithm_events)

    @property
    def algorithm_state(self) -> State:
        """State that the algorithms see."""
        assert self._algorithm_events is not None
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
        assert self._algorithm_events is not None
        self._algorithm_events.checkpoint = resume_from_checkpoint or None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Read the batches of a step, changed by algorithms; tokens are counted afterwards."""
        assert self._algorithm_events is not None
        return super().get_batch_samples(self._algorithm_events.read(epoch_iterator), *args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """Compute the gradients of a microbatch."""
        assert self._algorithm_events is not None
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
        assert self._algorithm_events is not None
        with self._algorithm_events.evaluating(dataloader):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, with EMA its average, and in checkpoints the state of the algorithms."""
        assert self._algorithm_events is not None
        with self._algorithm_events.saving():
            super().save_model(output_dir, _internal_call=_internal_call)
            # Within `saving`, since the state of EMA must hold the set of weights that the model does not.
            if _internal_call and self.args.should_save:
                self._algorithm_events.save(str(output_dir or self.args.output_dir))
