"""State that a training loop, its algorithms and its callbacks share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from composer_events._lists import OptimizerList, StableListAttribute, SteppingList, VersionedList
from composer_events._state_dict import (
    SERIALIZED_ATTRIBUTES,
    DataSource,
    build_state_dict,
    dataset_of,
    load_all,
    load_model,
    load_optimizers,
    named_by_class,
)
from composer_events._state_dict import numbered as numbered
from composer_events.algorithm import Algorithm
from composer_events.arguments import loaded, to_device, to_precision
from composer_events.batches import batch_get, batch_set
from composer_events.callback import Callback
from composer_events.parallelism import ShardingAnswers, get_global_rank
from composer_events.state_layout import get_model_state, get_optimizer_state
from composer_time import Serializable, Time, Timestamp, TimeUnit, ensure_time

__all__ = ["State"]

_NAMES: Final = ("inputs", "targets")


class BatchPart:
    """Descriptor of `inputs` or `targets`, one of the two parts of a batch; see `InputsTargetsMixin`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._index = _NAMES.index(name)

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if self._name not in instance.__dict__:
            raise self._missing(instance)
        return instance.batch[self._index] if _is_paired(instance) else instance.__dict__[self._name]

    def __set__(self, instance: Any, value: Any) -> None:
        own: dict[str, Any] = instance.__dict__
        own[self._name] = value
        if _is_paired(instance):
            parts = list(instance.batch)
            parts[self._index] = value
            instance.batch = tuple(parts)
        elif own["num_running_events"] == 0:
            _take_from_loop(instance, self._name)

    def __delete__(self, instance: Any) -> None:
        if self._name not in instance.__dict__:
            raise self._missing(instance)
        del instance.__dict__[self._name]
        # The loop no longer assigns both parts, so the batch is not their pair any more.
        instance.__dict__["_is_loop_of_pairs"] = False

    def _missing(self, instance: Any) -> AttributeError:
        message = f"{type(instance).__name__!r} object has no attribute {self._name!r}"
        return AttributeError(message, name=self._name, obj=instance)


class InputsTargetsMixin:
    """The part of `State` that holds `inputs` and `targets`.

    A loop such as `for state.inputs, state.targets in dataloader:` does not set `state.batch`, which algorithms read
    and replace. So when a loop assigns both parts while `batch` is `None`, it becomes the pair of them: assigning a
    part replaces it in the batch, and reading a part reads it from the batch. If an algorithm or another loop replaces
    the batch, the next pair becomes the batch again.

    With a Trainer, which sets `state.batch` itself, both are ordinary attributes, as if added by the user. The same
    holds if algorithms or callbacks assign them, or if one of them is `None`, until a loop begins as above.
    """

    batch: Any
    inputs = BatchPart()
    targets = BatchPart()


def _take_from_loop(instance: Any, name: str) -> None:
    """Set the batch to the pair of parts, if the loop assigned both and does not set batches otherwise."""
    own: dict[str, Any] = instance.__dict__
    new = own["_new_parts"] | {name}
    is_whole = len(new) == len(_NAMES)
    own["_new_parts"] = frozenset() if is_whole else new
    if not is_whole or any(own.get(part) is None for part in _NAMES):
        return
    # A batch that is already there was set by another loop, such as the Trainer's.
    if instance.batch is None or own["_is_loop_of_pairs"]:
        own["_is_loop_of_pairs"] = True
        instance.batch = tuple(own[part] for part in _NAMES)


def _is_paired(instance: Any) -> bool:
    if not instance.__dict__["_is_loop_of_pairs"]:
        return False
    batch = instance.batch
    return type(batch) in (tuple, list) and len(batch) == len(_NAMES)


if TYPE_CHECKING:
    from composer_events.data_position import DataPosition
    from composer_events.evaluator import Evaluator
else:  # for typing.get_type_hints; the imports would be circular, and that of DataPosition would import torch
    DataPosition = Evaluator = Any


class State(DataSource, InputsTargetsMixin, ShardingAnswers, Serializable):
    """Everything about a run that algorithms and callbacks may read and change.

    Values that change at every batch are plain attributes: `timestamp`, `previous_timestamp` (`None` before the first
    batch is done), `eval_timestamp`, `predict_timestamp`, `batch`, `outputs`, `loss`, `model`. `batch` is the whole
    batch from `Event.AFTER_DATALOADER` on, and a microbatch between `Event.BEFORE_FORWARD` and
    `Event.AFTER_BACKWARD`. Other attributes may be added. In a loop written as
    `for state.inputs, state.targets in dataloader:`, which sets no `batch`, the batch is the pair of these two.

    `optimizers`, `schedulers`, `algorithms`, `callbacks` and `evaluators` are lists that keep their identity:
    assigning one object or several replaces their contents.

    Args:
        model: The model to train, wrapped or not.
        rank_zero_seed: The seed of rank 0; other ranks add their rank.
        run_name: Generated if `None`. Ranks that train together must agree on it, so pass one there.
        device: A device object or its name. If `None`, `composer-dist` chooses one.
        max_duration: How long to train: epochs, a timestring or a `Time`.
        device_train_microbatch_size: Samples per forward pass on each rank.
        auto_microbatching: Whether the loop lowers that number when the device runs out of memory.
        train_dataloader: The dataloader that `fit` trains on, also while `dataloader` is another one.
        evaluators: One or several.
        dataloader: The dataloader of the current loop.
        dataloader_label: Its name, such as `'train'`, which is the default.
        dataloader_len: Batches per epoch; -1 uses the dataloader's length.
        dataset_state: Where to resume the dataset; loaded as soon as there is a dataset that supports it.
        dataset_resumption: Which datasets have been resumed.
        precision: A precision or its name, `'fp32'` if `None`.
        precision_config: Settings of the precision.
        optimizers: One or several.
        scaler: The gradient scaler.
        save_metrics: Whether metrics go into checkpoints.
        algorithms: One or several.
        callbacks: One or several, loggers included.
        parallelism_config: A `ParallelismConfig` of composer-fsdp, or another object with the attributes `fsdp`,
            `fsdp2` and `tp`. With the former, the ranks of a process group compare their settings and create
            `device_mesh` from them, so every rank must call this.
        grad_accum: The number of microbatches per batch, for loops that use gradient accumulation.
        deepspeed_config: The settings of DeepSpeed, if it trains the model.

    Example:
        >>> state = State(model=None, rank_zero_seed=7, max_duration="2ep", dataloader=[1, 2, 3])
        >>> state.dataloader_len, state.get_elapsed_duration()
        (Time(3, TimeUnit.BATCH), Time(0.0, TimeUnit.DURATION))
    """

    optimizers: StableListAttribute[OptimizerList] = StableListAttribute()
    schedulers: StableListAttribute[SteppingList] = StableListAttribute()
    algorithms: StableListAttribute[VersionedList[Algorithm]] = StableListAttribute()
    callbacks: StableListAttribute[VersionedList[Callback]] = StableListAttribute()
    evaluators: StableListAttribute[VersionedList[Evaluator]] = StableListAttribute()
    strategy: Any = None
    """The object that distributes the model over ranks, if any; checkpoints get the whole weights from it."""
    data_position: DataPosition | None = None
    """The position in the training data, if the loop attached one; see `composer_events.data_position`."""

    def __init__(
        self,
        model: Any,
        rank_zero_seed: int,
        run_name: str | None = None,
        device: Any = None,
        *,
        max_duration: int | str | Time[Any] | None = None,
        device_train_microbatch_size: int | float | None = None,
        auto_microbatching: bool = False,
        train_dataloader: Iterable[Any] | None = None,
        evaluators: Evaluator | Sequence[Evaluator] | None = None,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: int | Time[int] = -1,
        dataset_state: dict[str, Any] | None = None,
        dataset_resumption: dict[str, Any] | None = None,
        precision: Any = None,
        precision_config: dict[str, Any] | None = None,
        optimizers: Any = None,
        scaler: Any = None,
        save_metrics: bool = False,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        parallelism_config: Any = None,
        grad_accum: int | None = None,
        deepspeed_config: dict[str, Any] | None = None,
    ) -> None:
        self.model: Any = model
        self.rank_zero_seed = rank_zero_seed
        self.run_name = run_name or _new_run_name()
        self.device: Any = to_device(device)
        self.load_path: str | None = None
        self.profiler: Any = None
        self.max_duration = max_duration
        self._later_stops: list[bool] | None = None
        self.iteration_length = None

        self.device_train_microbatch_size = device_train_microbatch_size
        self.auto_microbatching = auto_microbatching
        self.grad_accum = grad_accum
        self.precision = precision
        self._precision_config = precision_config
        self.scaler: Any = scaler
        self.deepspeed_config = deepspeed_config
        self.save_metrics = save_metrics
        self._set_parallelism(parallelism_config)

        # The descriptors need their lists in `__dict__` before anything can be assigned.
        self.__dict__.update(optimizers=OptimizerList(), schedulers=SteppingList())
        self.__dict__.update(algorithms=VersionedList(), callbacks=VersionedList(), evaluators=VersionedList())
        self.optimizers = optimizers
        self.algorithms = algorithms
        self.callbacks = callbacks
        self.evaluators = evaluators

        self.pending_steps: Callable[[], object] | None = None
        self.pending_results: Callable[[], object] | None = None
        # The engine counts them, to distinguish assignments of algorithms and callbacks from those of the loop.
        self.num_running_events = 0
        self._is_loop_of_pairs = False
        self._new_parts: frozenset[str] = frozenset()
        self._begin_at_zero()
        # A copy per state, because users append attributes of their own.
        self.serialized_attributes: list[str] = list(SERIALIZED_ATTRIBUTES)

        self.dataset_state = dataset_state
        self.dataset_resumption: dict[str, Any] = {} if dataset_resumption is None else dataset_resumption
        self._train_dataloader = train_dataloader
        if dataloader is not None and dataloader_label is None:
            dataloader_label = "train"
        self.set_dataloader(dataloader, dataloader_label, dataloader_len)

    def settle(self) -> None:
        """Prepare the weights to be saved, evaluated or exported. Every rank must call this.

        Waits for the results of earlier steps, if a loop has set `pending_steps`: it may learn late that a step has
        made weights non-finite, and then raises. Optimizers with modes are switched by their `eval()`; a loop calls
        `optimizers.train()` before its next step.
        """
        if self.pending_steps is not None:
            self.pending_steps()
        self.optimizers.eval()

    @property
    def total_loss_dict(self) -> dict[str, Any]:
        """The losses of the latest batch by their log names, as means over the ranks.

        If a loop has set `pending_results`, which sets `total_loss_dict` and `train_metric_values`, a read waits for
        it. The ranks need not read together.
        """
        self._wait_for_results()
        return self._total_loss_dict

    @total_loss_dict.setter
    def total_loss_dict(self, losses: dict[str, Any]) -> None:
        self._total_loss_dict = losses

    @property
    def train_metric_values(self) -> dict[str, Any]:
        """The values of the metrics over the latest batch, by name. A read may wait, as for `total_loss_dict`."""
        self._wait_for_results()
        return self._train_metric_values

    @train_metric_values.setter
    def train_metric_values(self, values: dict[str, Any]) -> None:
        self._train_metric_values = values

    def _wait_for_results(self) -> None:
        if (wait := self.pending_results) is not None:
            wait()

    def _begin_at_zero(self) -> None:
        self.timestamp = Timestamp()
        self.previous_timestamp: Timestamp | None = None
        self.eval_timestamp = Timestamp()
        self.predict_timestamp = Timestamp()

        torch = loaded("torch")
        # Placeholders until the first forward pass; torch must not be imported only for them.
        self.batch: Any = None
        self.outputs: Any = None if torch is None else torch.empty(0)
        self.loss: Any = None if torch is None else torch.empty(0)

        self.train_metrics: dict[str, Any] | None = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.train_metric_values = {}
        self.eval_metric_values: dict[str, Any] = {}
        self.total_loss_dict = {}
        self.metric_outputs: dict[str, Any] = {}
        self.fsdp_modules: dict[str, Any] = {}
        self.automicrobatch_fsdp_hook_handles: list[Any] = []

    @property
    def seed(self) -> int:
        """The seed of this rank."""
        return self.rank_zero_seed + get_global_rank()

    @property
    def max_duration(self) -> Time[Any] | None:
        """Length of training. A bare number counts epochs. Assigning it resets `stopped_duration`.

        Raises:
            ValueError: If a fraction of training is assigned, such as `'0.5dur'`.
        """
        return self._max_duration

    @max_duration.setter
    def max_duration(self, max_duration: int | str | Time[Any] | None) -> None:
        duration = None if max_duration is None else ensure_time(max_duration, TimeUnit.EPOCH)
        if duration is not None and duration.unit is TimeUnit.DURATION:
            raise ValueError(
                f"max_duration={max_duration!r} is a fraction of max_duration itself. Give a length such as '10ep', "
                f"'500ba' or '1000000tok'."
            )
        self._max_duration = duration
        self.stopped_duration: str | None = None

    @property
    def iteration_length(self) -> Time[Any] | None:
        """Number of epochs or tokens in an iteration; `None` for no iterations.

        Raises:
            NotImplementedError: If a length in another unit is assigned.
        """
        return self._length_of_iteration

    @iteration_length.setter
    def iteration_length(self, iteration_length: str | Time[Any] | None) -> None:
        length = None if iteration_length is None else ensure_time(iteration_length, TimeUnit.EPOCH)
        if length is not None and length.unit not in (TimeUnit.EPOCH, TimeUnit.TOKEN):
            raise NotImplementedError(
                f"iteration_length={iteration_length!r} is neither in epochs nor in tokens, the units in which "
                f"iterations are counted. Give a length such as '2ep' or '1000000tok'."
            )
        self._length_of_iteration = length

    _iteration_length = iteration_length  # the name before it was public

    def get_elapsed_duration(self) -> Time[float] | None:
        """Return the fraction of training that is done, or `None` without a `max_duration`; 1 if that is 0."""
        if self._max_duration is None:
            return None
        if self._max_duration.value == 0:
            return Time(1.0, TimeUnit.DURATION)
        unit, length = self._max_duration.unit, self._max_duration.value
        return Time(self.timestamp.get(unit).value / length, TimeUnit.DURATION)

    def stop_training(self, *, resumable: bool = False) -> None:
        """Stop training after the current batch, or with several ranks after the next one, on all ranks alike.

        The events and evaluations of that batch still take place.

        Checkpoints store the stop: `stopped_duration` is the `max_duration` that was not reached.

        Args:
            resumable: Whether a resumed run continues to the original duration, as after the time limit of a job.
        """
        if self._later_stops is not None:
            self._later_stops.append(resumable)
            return
        duration, stopped = self._max_duration, self.stopped_duration
        # A repeated call keeps the duration of the first one, because `max_duration` is then the current time.
        if duration is not None and self.timestamp < duration:
            stopped = None if resumable else duration.to_timestring()
        unit = TimeUnit.EPOCH if duration is None else duration.unit
        # An epoch in progress is not counted, so the stop is expressed in batches.
        self.max_duration = self.timestamp.get(TimeUnit.BATCH if unit is TimeUnit.EPOCH else unit)
        self.stopped_duration = stopped

    @contextmanager
    def stopping_later(self) -> Generator[None]:
        """Delay the effect of calls of `stop_training` to the end of the `with` statement.

        A loop of several ranks uses it for events on which the ranks save together: a rank that stops on its own must
        not be the only one to save.
        """
        self._later_stops = []
        try:
            yield
        finally:
            stops, self._later_stops = self._later_stops, None
            for resumable in stops:
                self.stop_training(resumable=resumable)

    def batch_get_item(self, key: Any) -> Any:
        """Return a part of the batch; see `batch_get`."""
        return batch_get(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace a part of the batch; see `batch_set`."""
        self.batch = batch_set(self.batch, key, value)

    @property
    def precision(self) -> Any:
        """The numerical precision. A name is converted to a precision if `composer-dist` is installed."""
        return self._precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._precision = to_precision(precision)

    @property
    def precision_config(self) -> dict[str, Any] | None:
        """The settings of the precision."""
        return self._precision_config

    @property
    def deepspeed_enabled(self) -> bool:
        """Return whether DeepSpeed trains the model."""
        return self.deepspeed_config is not None

    @property
    def deepspeed_model(self) -> Any:
        """The model, if DeepSpeed trains it."""
        return self.model if self.deepspeed_enabled else None

    @property
    def current_metrics(self) -> dict[str, dict[str, Any]]:
        """All metrics by label: `train_metrics` under `train`, and `eval_metrics`. An older name, kept until 1.0."""
        return {"train": self.train_metrics or {}, **self.eval_metrics}

    def get_model_state_dict(self) -> dict[str, Any]:
        """Return the weights by name, without the prefixes of wrappers. Every rank must call this."""
        return get_model_state(self.model, self.fsdp_state_dict_type)

    def get_optim_state_dict(self) -> dict[str, Any]:
        """Return each optimizer's state by class name, with parameters by name. Every rank must call this."""
        state_dict_type = self.fsdp_state_dict_type
        return {
            name: get_optimizer_state(self.model, optimizer, state_dict_type)
            for name, optimizer in named_by_class(self.optimizers)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume the run.

        Weights and optimizer state are named by parameter; schedulers, callbacks, the scaler and the timestamp by
        class, the second of a class as `Name#1`; algorithms are a list of pairs in the order of `algorithms`.
        `integrations` and `metadata` are meant for readers of the checkpoint. Every rank must call this.
        """
        return build_state_dict(self)

    def _dataset_state_dict(self) -> dict[str, Any]:
        """Return the position in the training dataset; projects such as LLM-Shearing replace this method."""
        dataset = dataset_of(self.train_dataloader)
        train = (
            dataset.state_dict(int(self.timestamp.sample_in_epoch), True) if hasattr(dataset, "state_dict") else None
        )
        return {"train": train, "eval": {}}

    _dataset_of = staticmethod(dataset_of)  # called by the `_dataset_state_dict` of LLM-Shearing

    def load_state_dict(
        self,
        state: dict[str, Any],
        logger: Any = None,
        strict: bool = False,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: Sequence[Any] | None = None,
    ) -> None:
        """Restore the state that `state_dict` returned. Every rank must call this.

        Args:
            state: The result of `state_dict`, of this release or any since 0.7.
            logger: Passed to algorithms that are applied because the weights depend on them.
            strict: Whether missing or unexpected weights are an error.
            exclude_algorithms: Class names of algorithms not to apply.
            algorithm_passes: The engine's passes, which order those algorithms. The default ones if `None`.

        Raises:
            RuntimeError: If weights do not fit the model.
            KeyError: If a parameter is only in the optimizer or only in the saved one.
            ValueError: If an algorithm that the weights depend on cannot be applied.
        """
        load_all(self, state, logger, strict, exclude_algorithms, algorithm_passes)

    def load_model_state(
        self,
        state_dict: dict[str, Any],
        logger: Any,
        strict: bool,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: Sequence[Any] | None = None,
    ) -> None:
        """Load only the weights, after applying the algorithms that they depend on; see `load_state_dict`."""
        load_model(self, state_dict, logger, strict, exclude_algorithms, algorithm_passes)

    def load_optim_state(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load only the states of the optimizers that the checkpoint contains. Every rank must call this.

        Args:
            state_dict: The result of `state_dict`, of which the key `optimizers` is read.
            strict: Whether missing or unexpected parameters are an error.
        """
        load_optimizers(self, state_dict, strict)


if not TYPE_CHECKING:  # read several times per training step; attrgetter avoids a Python call
    State.max_duration = property(attrgetter("_max_duration"), State.max_duration.fset, doc=State.max_duration.__doc__)


def _new_run_name() -> str:
    # From the operating system: a seed must not determine the name, and drawing one must not advance the seeded RNG.
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
