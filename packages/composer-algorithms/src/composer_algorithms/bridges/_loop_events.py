"""Events and time of a foreign training loop, shared by all bridges."""

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_counts
from composer_algorithms.bridges._refusals import computes_between
from composer_dist import get_world_size
from composer_events import Algorithm, DataSpec, Engine, Event, State, Traces
from composer_models.base import ComposerModel
from composer_time import Timestamp, TimeUnit

__all__ = ["LoopBatch"]

_DEVICES = {"cuda": "gpu", "xla": "tpu"}  # from torch's device types to Composer's names


class BridgedModel(ComposerModel):
    """Model of another library in the form that algorithms expect, with a loss for those that compute one."""

    def __init__(self, model: nn.Module, forward: Any, loss: Any) -> None:
        super().__init__()
        self.model = model
        self._forward, self._loss = forward, loss

    def forward(self, batch: Any) -> Any:
        """Compute the outputs for a batch."""
        return self._forward(batch)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of outputs for a batch."""
        return self._loss(outputs, batch, *args, **kwargs)


class LoopEvents:
    """State and engine of a foreign training loop.

    Algorithms change the model: a `BridgedModel`, or the user's own. `of_state` are further arguments of `State`.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithms: Sequence[Algorithm],
        *,
        device: torch.device,
        **of_state: Any,
    ) -> None:
        device_name = _DEVICES.get(device.type, device.type)
        self.state = State(model, algorithms=algorithms, device=device_name, **of_state)
        self.engine = Engine(self.state)
        self.is_fitting = False
        self.is_evaluating = False
        self._counter = DataSpec(())  # counts the samples of batches of any form
        self._num_samples = self._num_tokens = 0

    def init(self) -> None:
        """Run `INIT`, on which algorithms change the model."""
        model = self.state.model
        inner = getattr(model, "model", None)
        self.engine.run_event(Event.INIT)
        # The loop holds a reference to the model, which a replacement would not change.
        if self.state.model is not model or getattr(model, "model", None) is not inner:
            names = ", ".join(type(algorithm).__name__ for algorithm in self.state.algorithms)
            raise ValueError(
                f"One of the algorithms {names} replaced the {type(inner or model).__name__}, "
                f"which the loop would continue to train: algorithms such as NoOpModel need the Trainer of "
                f"composer-suite. Leave it out."
            )

    def wrap_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return the optimizers to step with; call it once all objects that a checkpoint loads into exist."""
        self.state.optimizers = list(optimizers)
        self.engine.run_event(Event.BEFORE_LOAD)
        self.engine.run_event(Event.AFTER_LOAD)
        return list(self.state.optimizers)

    def start_fit(self, dataloader: Any, num_batches: int | None, max_duration: Any) -> None:
        """Begin a call of the other library's `fit`."""
        state = self.state
        state.max_duration = max_duration
        state.train_dataloader = dataloader
        state.set_dataloader(dataloader, "train", -1 if num_batches is None else num_batches)
        self.is_fitting = True
        self.engine.run_event(Event.FIT_START)

    def restart(self) -> None:
        """Reset the timestamp to 0."""
        self.state.timestamp = Timestamp()

    def resume_without_state(self, why: str, **time: Any) -> None:
        """Resume from a checkpoint of the other library alone, at the time that it has."""
        warnings.warn(f"{why}: it was saved without algorithms, so they start from scratch there.", stacklevel=3)
        self.state.timestamp = self.state.timestamp.copy(**time)

    def start_epoch(self) -> None:
        """Begin an epoch, unless a checkpoint resumes within it."""
        if self.state.timestamp.batch_in_epoch == 0:
            self.engine.run_event(Event.EPOCH_START)

    def load_batch(self, batch: Any) -> Any:
        """Return a batch, or a piece of one, as changed by algorithms after loading."""
        self._count(batch)
        self.state.batch = shallow_copy(batch)  # the dataloader may yield the same object again
        self.engine.run_event(Event.AFTER_DATALOADER)
        return self.state.batch

    def start_batch(self, batch: Any) -> Any:
        """Return a batch, or its first piece, as changed by algorithms at the start of the step."""
        self.state.batch = batch
        self.engine.run_event(Event.BATCH_START)
        return self.state.batch

    def end_batch(self) -> None:
        """Count a batch after the optimizer's step."""
        state = self.state
        state.previous_timestamp = state.timestamp
        # Assumes equal counts on all ranks, since asking them would cost a collective per batch.
        world_size = get_world_size()
        state.timestamp = state.timestamp.to_next_batch(self._num_samples * world_size, self._num_tokens * world_size)
        self._num_samples = self._num_tokens = 0
        self.engine.run_event(Event.BATCH_END)

    @property
    def is_epoch_complete(self) -> bool:
        """True once an epoch has as many batches as the dataloader."""
        length = self.state.dataloader_len
        return length is not None and self.state.timestamp.batch_in_epoch >= length

    def end_epoch(self) -> None:
        """Count an epoch."""
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_epoch()
        self.engine.run_event(Event.EPOCH_END)

    def end_iteration_if_due(self) -> None:
        """Count an iteration, if the state defines its length and that is reached."""
        state, length = self.state, self.state.iteration_length
        if length is None:
            return
        time = state.timestamp
        if (time.epoch_in_iteration if length.unit == TimeUnit.EPOCH else time.token_in_iteration) >= length:
            state.previous_timestamp, state.timestamp = time, time.to_next_iteration()
            self.engine.run_event(Event.ITERATION_END)
            self.engine.run_event(Event.ITERATION_CHECKPOINT)

    def end_fit(self) -> None:
        """End a call of the other library's `fit`."""
        self.engine.run_event(Event.FIT_END)
        self.is_fitting = False

    @contextmanager
    def evaluating(self, dataloader: Any = None) -> Iterator[None]:
        """Enclose an evaluation, in which the model holds the weights to be evaluated."""
        if self.is_evaluating:  # the outer evaluation has exchanged the weights already
            yield
            return
        first, last = Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END
        if self.is_fitting:
            first, last = Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL
        with self.reading(dataloader, "eval"):
            self.is_evaluating = True
            self.engine.run_event(first)
            self.engine.run_event(Event.EVAL_START)
            try:
                yield
            finally:
                # First, so that an error in an event cannot leave it set.
                self.is_evaluating = False
                self.engine.run_event(Event.EVAL_END)
                self.engine.run_event(last)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose a save, in which the model holds the weights to be saved, which are those to be evaluated.

        It runs as a standalone evaluation, at whose end the model gets its weights back immediately and independently
        of the next steps of the other library.
        """
        if self.is_evaluating:
            yield
            return
        self.engine.run_event(Event.EVAL_STANDALONE_START)
        try:
            yield
        finally:
            self.engine.run_event(Event.EVAL_STANDALONE_END)

    @contextmanager
    def reading(self, dataloader: Any, label: str) -> Iterator[None]:
        """Exchange the state's dataloader within the block."""
        state = self.state
        own = (state.dataloader, state.dataloader_label, state.dataloader_len)
        state.set_dataloader(() if dataloader is None else dataloader, label)
        try:
            yield
        finally:
            state.set_dataloader(own[0], own[1], -1 if own[2] is None else own[2])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithms and the timestamp: tensors, numbers and strings."""
        time = self.state.timestamp.state_dict()
        return {
            "algorithms": [[type(one).__qualname__, one.state_dict()] for one in self.state.algorithms],
            # Numbers only: the file must load with weights_only=True.
            "timestamp": {name: value for name, value in time.items() if isinstance(value, int)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`."""
        saved = [name for name, _ in state["algorithms"]]
        present = [type(one).__qualname__ for one in self.state.algorithms]
        if saved != present:
            raise ValueError(
                f"algorithms={present!r} are not those of the checkpoint, {saved!r}: pass the same ones in the same "
                f"order to resume."
            )
        for algorithm, (_, own) in zip(self.state.algorithms, state["algorithms"], strict=True):
            algorithm.load_state_dict(own)
        self.state.timestamp.load_state_dict(dict(state["timestamp"]))

    def _count(self, batch: Any) -> None:
        try:
            self._num_samples += int(self._counter.get_num_samples_in_batch(batch))
            self._num_tokens += self._counter.get_num_tokens_in_batch(batch)
        except (ValueError, NotImplementedError):
            # Batches of unknown form are fine unless time is measured in their samples or tokens.
            duration = self.state.max_duration
            if duration is not None and duration.unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN):
                raise


def shallow_copy(batch: Any) -> Any:
    """Return a batch whose parts can be exchanged without changing the original."""
    return copy.copy(batch) if isinstance(batch, (Mapping, MutableSequence)) else batch


def length_of(dataloader: Any) -> int | None:
    """Return the number of batches of a dataloader, if known."""
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):  # __len__ of a DataLoader over an iterable dataset raises, too
        return None


def needs_closure(optimizer: Any) -> bool:
    """Return whether an optimizer computes the loss itself, once or more per step, as SAM does."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # the attribute of Accelerate's wrapper
    if getattr(optimizer, "_step_supports_amp_closure", False):
        return True
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


_LOSSES = frozenset(
    {
        *(F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div),
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss, F.gaussian_nll_loss),
        *(F.soft_margin_loss, F.multilabel_soft_margin_loss, F.multilabel_margin_loss, F.multi_margin_loss),
    }
)
# These operations do not change the meaning of class indices.
_UNCHANGING = frozenset({Tensor.long, Tensor.contiguous, Tensor.detach, Tensor.clone})

ComputeLoss = Callable[[Any, Callable[[Any, Any], Any]], Any]


class DeferredTargets(Tensor):
    """Targets of a batch that intercept losses computed in user code.

    PyTorch's losses of outputs and these targets call `compute(outputs, loss)` instead, where `loss(outputs, targets)`
    is the original loss. All other operations see the values of the batch.
    """

    compute: ComputeLoss

    @classmethod
    def of(cls, targets: Tensor, compute: ComputeLoss) -> "DeferredTargets":
        """Wrap targets; the result shares their memory."""
        deferred = targets.as_subclass(cls)
        deferred.compute = compute
        return deferred

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Intercept losses, and compute everything else with the values."""
        named = dict(kwargs or {})
        if func in _LOSSES:
            others = {name: value for name, value in named.items() if name not in ("input", "target")}
            outputs = next(iter(args), named.get("input"))
            targets = args[1] if len(args) > 1 else named.get("target")
            if isinstance(targets, cls) and not isinstance(outputs, cls):
                return targets.compute(outputs, lambda outputs, targets: func(outputs, targets, *args[2:], **others))
        with torch._C.DisableTorchFunctionSubclass():  # as in PyTorch's notes on extending it
            result = func(*args, **named)
        if func in _UNCHANGING:
            return cls.of(result, next(iter(args)).compute)
        return _plain(result)


def _plain(result: Any) -> Any:
    if isinstance(result, DeferredTargets):  # e.g. the result of indexing
        with torch._C.DisableTorchFunctionSubclass():
            return result.as_subclass(Tensor)
    if isinstance(result, (tuple, list)) and type(result) in (tuple, list):
        return type(result)(map(_plain, result))
    return result


class Epochs:
    """Epoch events of a loop that reads its batches through `read` or from the dataloader itself."""

    def __init__(self, events: LoopEvents, dataloader: Iterable[Any], num_microbatches: int) -> None:
        check_counts(num_microbatches=num_microbatches)
        if num_microbatches > 1 and length_of(dataloader) is None:
            raise ValueError(
                f"num_microbatches={num_microbatches!r} needs a dataloader with a length, to know when fewer batches "
                f"are left, and {type(dataloader).__name__} has none. Pass num_microbatches=1."
            )
        self._events = events
        self._dataloader = dataloader
        self._num_microbatches = num_microbatches
        self._num_read = 0  # batches of the dataloader in this epoch
        self._num_to_skip = 0
        self._has_begun = False
        self._is_read_here = False

    def read(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or the rest of an epoch after a checkpoint was loaded."""
        self._is_read_here = True
        try:
            self._begin()
            iterator = itertools.islice(self._dataloader, self._num_to_skip, None)
            self._num_to_skip = 0
            while True:  # not a for loop, since BEFORE_DATALOADER must precede each read
                self._events.engine.run_event(Event.BEFORE_DATALOADER)
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                yield batch
            self._end()
        finally:
            self._is_read_here = False

    def begin_batch(self) -> None:
        """Begin an epoch if due, in a loop that reads the dataloader itself."""
        if not self._is_read_here:
            self._begin()
            self._events.engine.run_event(Event.BEFORE_DATALOADER)

    def count(self) -> None:
        """Count a batch of the dataloader."""
        self._num_read += 1

    def num_pieces(self) -> int:
        """Return the number of dataloader batches in the next step, which may be smaller at the end of an epoch."""
        if self._num_microbatches == 1:
            return 1
        return max(1, min(self._num_microbatches, self._length() - self._num_read))

    def end_batch(self) -> None:
        """End an epoch if due, in a loop that reads the dataloader itself."""
        if not self._is_read_here and self._num_read >= self._length():
            self._end()

    def resume(self) -> None:
        """Resume within the epoch of the timestamp."""
        # The timestamp counts optimizer steps, the dataloader microbatches.
        self._num_to_skip = int(self._events.state.timestamp.batch_in_epoch) * self._num_microbatches
        self._num_read = self._num_to_skip
        self._has_begun = False

    def _begin(self) -> None:
        events, engine = self._events, self._events.engine
        if not events.is_fitting:
            length = length_of(self._dataloader)
            num_batches = None if length is None else -(-length // self._num_microbatches)
            events.start_fit(self._dataloader, num_batches, events.state.max_duration)
        if self._has_begun:
            return
        if not self._is_read_here:
            self._length()  # raises early if the end of the epoch could not be recognized
        self._has_begun = True
        if events.state.timestamp.batch_in_epoch == 0 and events.state.timestamp.epoch_in_iteration == 0:
            engine.run_event(Event.ITERATION_START)
        events.start_epoch()

    def _end(self) -> None:
        self._has_begun, self._num_read = False, 0
        self._events.end_epoch()
        self._events.engine.run_event(Event.EPOCH_CHECKPOINT)
        self._events.end_iteration_if_due()

    def _length(self) -> int:
        length = length_of(self._dataloader)
        if length is not None:
            return length
        raise RuntimeError(
            f"{type(self._dataloader).__name__} has no length, so the end of an epoch is unknown: read it with "
            f"`for x, y in loop.epoch():`."
        )


class LoopBatch:
    """The current batch of training or evaluation.

    Read the inputs, assign `outputs`, then read the targets and assign `loss`. Algorithms act between these steps, so
    read inputs and targets from this object, each when it is needed. Evaluation assigns no loss.
    """

    def __init__(self, events: LoopEvents, phase: str = "") -> None:
        self._events = events
        self._phase = phase
        self._has_outputs = False
        self._has_loss = False
        self._unread: Traces | None = None  # changes by algorithms since the batch was last read
        self._run("before_forward")

    @property
    def batch(self) -> Any:
        """The batch in its current state."""
        self._unread = None
        return self._events.state.batch

    @property
    def inputs(self) -> Any:
        """The first part of the batch in its current state."""
        return self.batch[0]

    @property
    def targets(self) -> Any:
        """The second part of the batch in its current state."""
        return self.batch[1]

    @property
    def outputs(self) -> Any:
        """Output of the model. Assign it before the loss is computed."""
        return self._events.state.outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self._refuse_unread("outputs", "inputs")
        self._events.state.outputs = outputs
        self._has_outputs = True
        self._run("after_forward")
        if not self._phase:
            self._run("before_loss")

    @property
    def loss(self) -> Any:
        """The loss. Assign it at the end of the block; the loop runs the backward pass."""
        return self._events.state.loss

    @loss.setter
    def loss(self, loss: Tensor) -> None:
        if self._phase:
            raise RuntimeError("b.loss was assigned in an evaluation, where no loss is minimized: assign b.outputs.")
        if not self._has_outputs:
            between = [type(one).__name__ for one in self._events.state.algorithms if computes_between(one)]
            if between:
                raise RuntimeError(
                    f"b.loss was assigned before b.outputs, and {', '.join(between)} acts in between. Assign b.outputs "
                    f"= model(b.inputs), then compute the loss of b.outputs and b.targets."
                )
            self._run("after_forward")  # no algorithm acts on these events, but callbacks may
            self._run("before_loss")
        self._refuse_unread("loss", "targets")
        if not (isinstance(loss, Tensor) and loss.numel() == 1):
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TypeError(f"b.loss is {what}, and must be a tensor with one value: assign the mean of the losses.")
        self._events.state.loss = loss
        self._has_loss = True
        self._run("after_loss")

    def finish(self) -> Any:
        """Return the loss to minimize, or in evaluation the outputs, which the block must have assigned."""
        name, is_there = ("outputs", self._has_outputs) if self._phase else ("loss", self._has_loss)
        if not is_there:
            raise RuntimeError(f"The block of the batch ended without b.{name}: assign it, as in `b.{name} = ...`.")
        return self.outputs if self._phase else self.loss

    def _run(self, event: str) -> None:
        traces = self._events.engine.run_event(Event(f"{self._phase}{event}"))
        if traces and event != "after_loss":  # the batch is not read after that
            self._unread = traces

    def _refuse_unread(self, assigned: str, part: str) -> None:
        if self._unread:
            names = ", ".join(trace.name for trace in self._unread.values())
            raise RuntimeError(
                f"b.{assigned} was assigned, and {names} changed the batch before, which was not read since. Compute "
                f"it from b.{part} or b.batch, read where it is needed, and not from variables of your own."
            )
