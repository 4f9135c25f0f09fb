"""What somebody else's loop does, told to an engine: the one place where bridges send events and keep the time."""

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms.bridges._refusals import check_algorithms, refuse_unserved
from composer_dist import get_world_size
from composer_events.algorithm import Algorithm
from composer_events.data_spec import DataSpec
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.state import State
from composer_models.base import ComposerModel
from composer_time import Timestamp, TimeUnit

_DEVICES = {"cuda": "gpu", "xla": "tpu"}  # torch's names, and those of our devices where they differ


class BridgedModel(ComposerModel):
    """A model of another library as algorithms see it, with what is computed with it.

    Args:
        model: The other library's.
        forward: Computes the outputs for a batch.
        loss: Computes a loss from outputs and a batch, for algorithms that need one besides that of the loop.
    """

    def __init__(self, model: nn.Module, forward: Any, loss: Any) -> None:
        super().__init__()
        self.model = model
        self._forward, self._loss = forward, loss

    def forward(self, batch: Any) -> Any:
        """Compute the outputs."""
        return self._forward(batch)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss."""
        return self._loss(outputs, batch, *args, **kwargs)


class LoopEvents:
    """The state and the engine of a loop that is not ours.

    Args:
        model: What algorithms change: a `BridgedModel`, or the user's own.
        algorithms: To be run.
        bridge: What the user calls the bridge.
        served: The events that it comes to.
        device: torch's.
        **of_state: Further arguments of `State`.

    Raises:
        TypeError: If one of the algorithms is none.
        ValueError: If one of them acts on an event that is not served.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithms: Algorithm | Iterable[Algorithm],
        *,
        bridge: str,
        served: Collection[Event],
        device: torch.device,
        **of_state: Any,
    ) -> None:
        device_name = _DEVICES.get(device.type, device.type)
        self.state = State(model, algorithms=check_algorithms(algorithms), device=device_name, **of_state)
        refuse_unserved(self.state.algorithms, served, bridge, self.state)
        self.engine = Engine(self.state)
        self.is_fitting = False
        self._is_evaluating = False
        self._counter = DataSpec(())
        self._num_samples = self._num_tokens = 0

    def init(self) -> None:
        """Let algorithms change the model."""
        model = self.state.model
        inner = getattr(model, "model", None)
        self.engine.run_event(Event.INIT)
        if self.state.model is not model or getattr(model, "model", None) is not inner:
            names = ", ".join(type(algorithm).__name__ for algorithm in self.state.algorithms)
            raise ValueError(
                f"One of the algorithms {names} put another model in the place of the {type(inner or model).__name__}, "
                f"which the loop would go on to train: algorithms such as NoOpModel need the Trainer of "
                f"composer-suite. Leave it out."
            )

    def wrap_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return the optimizers to step with, once everything is there that a checkpoint is loaded into."""
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
        """Begin to count from 0."""
        self.state.timestamp = Timestamp()

    def start_epoch(self) -> None:
        """Begin an epoch, unless a checkpoint goes on within it."""
        if self.state.timestamp.batch_in_epoch == 0:
            self.engine.run_event(Event.EPOCH_START)

    def load_batch(self, batch: Any) -> Any:
        """Return what algorithms make of a batch, or of a piece of one, that comes from the dataloader."""
        self._count(batch)
        self.state.batch = shallow_copy(batch)
        self.engine.run_event(Event.AFTER_DATALOADER)
        return self.state.batch

    def start_batch(self, batch: Any) -> Any:
        """Return what algorithms make of a batch, or of the first piece of one, when the work on it begins."""
        self.state.batch = batch
        self.engine.run_event(Event.BATCH_START)
        return self.state.batch

    def end_batch(self) -> None:
        """Count a batch after the optimizer's step."""
        state = self.state
        state.previous_timestamp = state.timestamp
        # As many on every rank; asking the others would cost a collective for each batch.
        world_size = get_world_size()
        state.timestamp = state.timestamp.to_next_batch(self._num_samples * world_size, self._num_tokens * world_size)
        self._num_samples = self._num_tokens = 0
        self.engine.run_event(Event.BATCH_END)

    @property
    def is_epoch_complete(self) -> bool:
        """Whether as many batches are done as an epoch has."""
        length = self.state.dataloader_len
        return length is not None and self.state.timestamp.batch_in_epoch >= length

    def end_epoch(self) -> None:
        """Count an epoch."""
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_epoch()
        self.engine.run_event(Event.EPOCH_END)

    def end_iteration_if_due(self) -> None:
        """Count an iteration, if the state has a length for it that is over."""
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

    def refuse_training(self) -> None:
        """Raise if somebody trains inside an evaluation, where another set of weights may be in the model.

        Raises:
            RuntimeError: If so.
        """
        if self._is_evaluating:
            raise RuntimeError(
                "a batch is trained inside `with loop.evaluation():`, where the model may hold an average of its "
                "weights: leave that block first."
            )

    @contextmanager
    def evaluating(self, dataloader: Any = None) -> Iterator[None]:
        """Enclose an evaluation, in which the model holds what is to be evaluated."""
        if self._is_evaluating:
            yield
            return
        first, last = Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END
        if self.is_fitting:
            first, last = Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL
        with self.reading(dataloader, "eval"):
            self._is_evaluating = True
            self.engine.run_event(first)
            self.engine.run_event(Event.EVAL_START)
            try:
                yield
            finally:
                self._is_evaluating = False
                self.engine.run_event(Event.EVAL_END)
                self.engine.run_event(last)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose a save, in which the model holds what is to be saved: what would be evaluated.

        It is told as an evaluation of its own, at whose end the model has its weights back at once, whatever the other
        library does next.
        """
        if self._is_evaluating:
            yield
            return
        self.engine.run_event(Event.EVAL_STANDALONE_START)
        try:
            yield
        finally:
            self.engine.run_event(Event.EVAL_STANDALONE_END)

    @contextmanager
    def reading(self, dataloader: Any, label: str) -> Iterator[None]:
        """Let the state's dataloader be another one."""
        state = self.state
        own = (state.dataloader, state.dataloader_label, state.dataloader_len)
        state.set_dataloader(() if dataloader is None else dataloader, label)
        try:
            yield
        finally:
            state.set_dataloader(own[0], own[1], -1 if own[2] is None else own[2])

    def state_dict(self) -> dict[str, Any]:
        """Return what algorithms need to go on, and the time: tensors, numbers and strings."""
        time = self.state.timestamp.state_dict()
        return {
            "algorithms": [[type(one).__qualname__, one.state_dict()] for one in self.state.algorithms],
            "timestamp": {name: value for name, value in time.items() if isinstance(value, int)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            ValueError: If it was called with other algorithms.
        """
        saved, present = (
            [name for name, _ in state["algorithms"]],
            [type(a).__qualname__ for a in self.state.algorithms],
        )
        if saved != present:
            raise ValueError(
                f"algorithms={present!r} are not those of the checkpoint, {saved!r}: pass the same ones in the same "
                f"order to go on with it."
            )
        for algorithm, (_, own) in zip(self.state.algorithms, state["algorithms"], strict=True):
            algorithm.load_state_dict(own)
        self.state.timestamp.load_state_dict(dict(state["timestamp"]))

    def _count(self, batch: Any) -> None:
        try:
            self._num_samples += int(self._counter.get_num_samples_in_batch(batch))
            self._num_tokens += self._counter.get_num_tokens_in_batch(batch)
        except (ValueError, NotImplementedError):
            # Batches of any kind do, where time is not counted in what they hold.
            duration = self.state.max_duration
            if duration is not None and duration.unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN):
                raise


def shallow_copy(batch: Any) -> Any:
    """Return a batch whose parts can be exchanged without changing the one that was given."""
    return copy.copy(batch) if isinstance(batch, (Mapping, MutableSequence)) else batch


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter is."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def length_of(dataloader: Any) -> int | None:
    """Return how many batches a dataloader has, if it knows."""
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):  # also those of data that have none, whose __len__ only says so
        return None


def needs_closure(optimizer: Any) -> bool:
    """Answer whether an optimizer computes the loss itself, once or more in a step, as SAM's does."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's keep it there
    if getattr(optimizer, "_step_supports_amp_closure", False):
        return True
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_loss(loss: Any, name: str) -> Tensor:
    """Return the loss if it is one.

    Raises:
        TypeError: If it is none.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise TypeError(
        f"{name} is {what}, and what is minimised has one value: give a tensor with the mean of the losses."
    )
