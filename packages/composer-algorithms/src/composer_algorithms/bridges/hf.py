"""Algorithms in the Trainer of Hugging Face."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer_events.algorithm import Algorithm
from composer_events.state import State

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint

    from composer_algorithms.bridges._hf_events import Moments, TrainerEvents
else:
    try:
        from transformers.trainer_utils import get_last_checkpoint
    except ImportError as error:
        raise ImportError(
            f"{error}: composer_algorithms.bridges.hf needs transformers and Accelerate. Install "
            "them with `pip install 'composer-algorithms[transformers,accelerate]'`."
        ) from error
    from composer_algorithms.bridges._hf_events import Moments, TrainerEvents

    Trainer = object  # a mixin: what it calls is in the class beside it

__all__ = ["AlgorithmTrainerMixin"]


class AlgorithmTrainerMixin(Trainer):
    """Let a Hugging Face Trainer run algorithms: put it before the Trainer among the bases of a class.

    The Trainer's own way is not changed: it accumulates gradients, computes in mixed precision, clips, evaluates, saves
    and resumes as its arguments say. A step of the optimizer is a batch of the algorithms, and what the dataloader
    yields a microbatch. Where `EMA` keeps an average, that is what is evaluated, predicted with and saved as the model;
    each checkpoint folder has a file `composer_algorithms.pt` with what algorithms need to go on.

    What to know:

    - The model computes its loss within its forward pass. Algorithms that act on outputs or targets in between, such as
      `LabelSmoothing`, or on losses need the Trainer's `compute_loss_func(outputs, labels, num_items_in_batch=...)`.
    - Batches are dicts: `MixUp(input_key="pixel_values", target_key="labels")`.
    - The Trainer clips gradients itself, by `max_grad_norm=1.0` unless that is set to 0, before `GradientClipping`.
    - `SAM` looks a second time at all microbatches of a step. It does not go with float16.

    Args:
        *args: The Trainer's.
        algorithms: One or several.
        **kwargs: The Trainer's.

    Attributes:
        algorithm_state: What algorithms see.

    Raises:
        TypeError: If one of the algorithms is none.
        ValueError: If an algorithm does not go with the Trainer as it is set up: it acts on an event that never comes,
            or would have no effect.

    Example:
        Make a class and give it algorithms:

            class AlgorithmTrainer(AlgorithmTrainerMixin, Trainer):
                pass

            trainer = AlgorithmTrainer(model, args, train_dataset=dataset, algorithms=[EMA(half_life="100ba")])
    """

    _algorithm_events: "TrainerEvents | None" = None  # until there is a model

    def __init__(self, *args: Any, algorithms: Algorithm | list[Algorithm] | tuple[Algorithm, ...] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._algorithm_events = TrainerEvents(self, algorithms)
        self.add_callback(Moments(self, self._algorithm_events))

    @property
    def algorithm_state(self) -> State:
        """What algorithms see."""
        assert self._algorithm_events is not None
        return self._algorithm_events.state

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, and let algorithms wrap it."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._algorithm_events is not None:
            optimizer = self.optimizer = self._algorithm_events.wrap_optimizer(optimizer)
        return optimizer

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, with algorithms that go on where the checkpoint leaves them."""
        if resume_from_checkpoint is True:  # True stays if there is none, which the Trainer refuses
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        assert self._algorithm_events is not None
        self._algorithm_events.checkpoint = resume_from_checkpoint or None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Read the batches of a step, as algorithms change them; tokens are counted afterwards."""
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
        """Compute the loss; while training with the events around it."""
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
        """Evaluate or predict, with the average where EMA keeps one."""
        assert self._algorithm_events is not None
        with self._algorithm_events.evaluating(dataloader):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, which is the average where EMA keeps one, and in checkpoints what algorithms need."""
        assert self._algorithm_events is not None
        with self._algorithm_events.saving():
            super().save_model(output_dir, _internal_call=_internal_call)
            if _internal_call and self.args.should_save:
                self._algorithm_events.save(str(output_dir or self.args.output_dir))
