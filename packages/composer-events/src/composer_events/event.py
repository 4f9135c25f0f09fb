"""Events of a training loop at which algorithms and callbacks may act."""

from difflib import get_close_matches

from composer_time import StringEnum

__all__ = ["Event", "ProfilerAction"]


class Event(StringEnum):
    """Event of a training loop, in the order in which the Trainer reaches it.

    A name in any case is converted to its event: `Event("before_forward") is Event.BEFORE_FORWARD`. Events come in
    pairs around a piece of work. On those whose name begins with `AFTER_` the engine runs algorithms in reverse order,
    so that the first change is undone last.

    | Around | Before | After |
    |---|---|---|
    | loading a checkpoint | `BEFORE_LOAD` | `AFTER_LOAD` |
    | a call of `fit` | `FIT_START` | `FIT_END` |
    | an iteration, an epoch | `ITERATION_START`, `EPOCH_START` | `ITERATION_END`, `EPOCH_END` |
    | fetching a batch | `BEFORE_DATALOADER` | `AFTER_DATALOADER` |
    | a batch, optimizer step included | `BATCH_START` | `BATCH_END` |
    | the gradients of a batch | `BEFORE_TRAIN_BATCH` | `AFTER_TRAIN_BATCH` |
    | a microbatch's forward, loss, backward | `BEFORE_FORWARD`, ... | `AFTER_FORWARD`, ... |
    | evaluation | `EVAL_BEFORE_ALL`, `EVAL_START`, ... | `EVAL_AFTER_ALL`, `EVAL_END`, ... |
    | prediction | `PREDICT_START`, ... | `PREDICT_END`, ... |

    `INIT` and the three `*_CHECKPOINT` events have no counterpart.

    Raises:
        ValueError: If a string is not the name of an event; the message contains the nearest names.

    Example:
        >>> Event("batch_end").canonical_name, Event.BATCH_END.is_after_event
        ('batch', True)
    """

    INIT = "init"
    """The model and the optimizers exist and nothing is wrapped yet: the time for model surgery."""
    BEFORE_LOAD = "before_load"
    """The model is sharded, if it will be, and no checkpoint has been searched for."""
    AFTER_LOAD = "after_load"
    """The checkpoint, if any, is loaded; DDP and compilation come next."""
    FIT_START = "fit_start"
    """A call of `fit` begins; the dataloader and the duration are set."""
    ITERATION_START = "iteration_start"
    """The first epoch of an iteration begins."""
    EPOCH_START = "epoch_start"
    """An epoch begins at its first batch."""
    BEFORE_DATALOADER = "before_dataloader"
    """A batch will be fetched, or the dataloader is exhausted."""
    AFTER_DATALOADER = "after_dataloader"
    """`state.batch` is fetched and transformed; it is normally still on the host."""
    BATCH_START = "batch_start"
    """The work on a batch begins."""
    BEFORE_TRAIN_BATCH = "before_train_batch"
    """The gradients of a batch will be computed; fires again each time the optimizer calls its closure."""
    BEFORE_FORWARD = "before_forward"
    """`state.batch` is a microbatch on the device."""
    AFTER_FORWARD = "after_forward"
    """`state.outputs` holds the model's outputs for the microbatch."""
    BEFORE_LOSS = "before_loss"
    """The loss of the microbatch will be computed."""
    AFTER_LOSS = "after_loss"
    """`state.loss` holds the loss of the microbatch."""
    BEFORE_BACKWARD = "before_backward"
    """The gradients of the microbatch will be computed."""
    AFTER_BACKWARD = "after_backward"
    """The gradients of the microbatch are added to those of the batch."""
    AFTER_TRAIN_BATCH = "after_train_batch"
    """The gradients of the batch are complete and unscaled; the optimizer has not stepped."""
    BATCH_END = "batch_end"
    """The optimizer has stepped and the timestamp counts the batch."""
    BATCH_CHECKPOINT = "batch_checkpoint"
    """Evaluation after the batch, if it was due, is done: the time to save."""
    EPOCH_END = "epoch_end"
    """The dataloader is exhausted and the timestamp counts the epoch."""
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    """Evaluation after the epoch, if it was due, is done: the time to save."""
    ITERATION_END = "iteration_end"
    """The timestamp counts the iteration."""
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    """The time to save after an iteration."""
    FIT_END = "fit_end"
    """A call of `fit` ends."""

    EVAL_BEFORE_ALL = "eval_before_all"
    """At least one evaluator is due inside `fit`."""
    EVAL_START = "eval_start"
    """An evaluator begins."""
    EVAL_BATCH_START = "eval_batch_start"
    """The work on an evaluation batch begins."""
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    """`state.batch` is an evaluation microbatch on the device."""
    EVAL_AFTER_FORWARD = "eval_after_forward"
    """`state.outputs` holds the model's outputs; the metrics are not updated yet."""
    EVAL_BATCH_END = "eval_batch_end"
    """The evaluation timestamp counts the batch."""
    EVAL_END = "eval_end"
    """An evaluator's metrics are computed and logged."""
    EVAL_AFTER_ALL = "eval_after_all"
    """Every evaluator that was due is done."""
    EVAL_STANDALONE_START = "eval_standalone_start"
    """A call of `Trainer.eval` begins."""
    EVAL_STANDALONE_END = "eval_standalone_end"
    """A call of `Trainer.eval` ends."""

    PREDICT_START = "predict_start"
    """A call of `Trainer.predict` begins."""
    PREDICT_BATCH_START = "predict_batch_start"
    """The work on a prediction batch begins."""
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    """`state.batch` is a prediction batch on the device."""
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    """`state.outputs` holds the predictions."""
    PREDICT_BATCH_END = "predict_batch_end"
    """The prediction timestamp counts the batch."""
    PREDICT_END = "predict_end"
    """A call of `Trainer.predict` ends."""

    @property
    def is_before_event(self) -> bool:
        """Return whether the event begins a piece of work that another event ends."""
        return "before_" in self.value or self.value.endswith("_start")

    @property
    def is_after_event(self) -> bool:
        """Return whether the event ends a piece of work that another event began."""
        return "after_" in self.value or self.value.endswith("_end")

    @property
    def canonical_name(self) -> str:
        """The name that an event shares with the one it pairs with, such as `batch` for `BATCH_START`."""
        return self.value.replace("before_", "").replace("after_", "").removesuffix("_start").removesuffix("_end")

    @property
    def is_predict(self) -> bool:
        """Return whether the event belongs to `Trainer.predict`."""
        return self.value.startswith("predict")

    @property
    def is_eval(self) -> bool:
        """Return whether the event belongs to evaluation."""
        return self.value.startswith("eval")

    @classmethod
    def _missing_(cls, value: object) -> StringEnum:
        try:
            return super()._missing_(value)
        except ValueError:
            names = [event.value for event in cls]
            # Without a cutoff: the nearest names help even if none is close.
            nearest = get_close_matches(str(value).lower(), names, n=3, cutoff=0.0)
            raise ValueError(
                f"event {value!r} does not exist. The nearest names are {', '.join(map(repr, nearest))}; "
                f"`list(Event)` has all {len(names)}, in the order in which they fire."
            ) from None


class ProfilerAction(StringEnum):
    """Action of a profiler during one batch. A marker records while the action is among its own actions.

    Example:
        >>> ProfilerAction("active_and_save")
        <ProfilerAction.ACTIVE_AND_SAVE: 'active_and_save'>
    """

    SKIP = "skip"
    """Record nothing."""
    WARMUP = "warmup"
    """Record and discard, so that start-up costs are not measured."""
    ACTIVE = "active"
    """Record."""
    ACTIVE_AND_SAVE = "active_and_save"
    """Record, and at the end of the batch save everything recorded since the last save."""
