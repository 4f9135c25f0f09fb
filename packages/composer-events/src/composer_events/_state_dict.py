"""Saving `State` to a checkpoint and loading it."""

from __future__ import annotations

import ast
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from composer_events.algorithm import Algorithm
from composer_events.arguments import algorithm_modules, loaded
from composer_events.batches import ensure_tuple, innermost_dataloader, length_or_none
from composer_events.event import Event
from composer_events.hparams import get_composer_env_dict
from composer_events.parallelism import any_rank, get_world_size
from composer_events.passes import DEFAULT_PASSES
from composer_events.state_layout import (
    get_metric_states,
    set_metric_states,
    set_model_state,
    set_optimizer_state,
    unwrapped,
)
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events.state import State


STOPPED_KEY = "stopped_duration"  # stored with the timestamp, so that both are loaded or left out together

SERIALIZED_ATTRIBUTES = (
    "model",
    "optimizers",
    "schedulers",
    "algorithms",
    "callbacks",
    "scaler",
    "timestamp",
    "rank_zero_seed",
    "train_metrics",
    "eval_metrics",
    "run_name",
    "dataset_state",
)


def build_state_dict(state: State) -> dict[str, Any]:
    """Collect the state needed to resume a run. Every rank must call this if the model is sharded."""
    collected: dict[str, Any] = {}
    for name in state.serialized_attributes:
        # Users may append names of attributes that need no conversion.
        collect = _COLLECTORS.get(name)
        collected[name] = getattr(state, name, None) if collect is None else collect(state)
    collected["integrations"] = _integrations(state)
    collected["metadata"] = _metadata(state)
    return {name: value for name, value in collected.items() if value is not None}


def numbered(names: Iterable[str]) -> list[str]:
    """Return names, the second of several equal ones as `Name#1`, the third as `Name#2`."""
    unique: list[str] = []
    seen = Counter[str]()
    for name in names:
        unique.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return unique


def named_by_class(objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each object with its class name, numbered if there are several of a class."""
    items = list(objects)
    return zip(numbered([type(item).__qualname__ for item in items]), items, strict=True)


def _collect_by_class(attribute: str) -> Callable[[State], dict[str, Any] | None]:
    def collect(state: State) -> dict[str, Any] | None:
        value = getattr(state, attribute)
        if value is None:
            return None
        return {name: item.state_dict() for name, item in named_by_class(ensure_tuple(value))}

    return collect


def _collect_timestamp(state: State) -> dict[str, Any] | None:
    collected = _collect_by_class("timestamp")(state)
    if collected is not None and state.stopped_duration is not None:
        collected[STOPPED_KEY] = state.stopped_duration
    return collected


_COLLECTORS: Mapping[str, Callable[[Any], Any]] = {
    "model": lambda state: state.get_model_state_dict(),
    "optimizers": lambda state: state.get_optim_state_dict(),
    "schedulers": _collect_by_class("schedulers"),
    "algorithms": lambda state: [(type(each).__qualname__, each.state_dict()) for each in state.algorithms],
    "callbacks": _collect_by_class("callbacks"),
    "scaler": _collect_by_class("scaler"),
    "timestamp": _collect_timestamp,
    "train_metrics": lambda state: (
        get_metric_states(state.train_metrics) if state.save_metrics and state.train_metrics is not None else None
    ),
    "eval_metrics": lambda state: (
        {label: get_metric_states(metrics) for label, metrics in state.eval_metrics.items()}
        if state.save_metrics
        else None
    ),
    "dataset_state": lambda state: state._dataset_state_dict(),
}


def _integrations(state: State) -> dict[str, Any]:
    model: Any = unwrapped(state.model)
    # Declared by the class, such as 'huggingface', next to `get_metadata`.
    name: str | None = getattr(model.__class__, "checkpoint_integration", None)
    return {} if name is None else {name: model.get_metadata()}


def _metadata(state: State) -> dict[str, Any]:
    # If torch is not imported, the state has no weights, and the version is not worth the slow import.
    torch = loaded("torch")
    metadata: dict[str, Any] = {
        "composer_env_info": get_composer_env_dict(),
        "torch_version": None if torch is None else str(torch.__version__),
        "device": getattr(state.device, "name", state.device),
        "precision": getattr(state.precision, "value", state.precision),
        "world_size": get_world_size(),
        "device_train_microbatch_size": state.device_train_microbatch_size,
    }
    dataloader = state.train_dataloader
    if hasattr(dataloader, "batch_size"):
        metadata["train_dataloader_batch_size"] = dataloader.batch_size
    if state.data_position is not None and state.data_position.share is not None:
        metadata["num_data_shares"] = state.data_position.num_shares
    return metadata


class DataSource:
    """The part of `State` that holds the dataloaders and the dataset state."""

    dataset_state: dict[str, Any] | None
    dataset_resumption: dict[str, Any]
    _train_dataloader: Any
    _dataloader: Any = None
    _dataloader_label: str | None = None
    _dataloader_len: Time[int] | None = None

    @property
    def dataloader(self) -> Any:
        """The dataloader of the current loop; see `set_dataloader`."""
        return self._dataloader

    @property
    def dataloader_label(self) -> str | None:
        """The name of `dataloader`."""
        return self._dataloader_label

    @property
    def dataloader_len(self) -> Time[int] | None:
        """Number of batches per epoch, or `None` if it is unknown.

        Assign a number to read fewer than the dataloader has, or -1 to use its length.

        Raises:
            RuntimeError: If it is assigned while `dataloader` is `None`.
            TypeError: If anything but a whole number or a `Time` is assigned.
            ValueError: If a `Time` in another unit than batches is assigned.
        """
        return self._dataloader_len

    @dataloader_len.setter
    def dataloader_len(self, num_batches: int | Time[int]) -> None:
        num_batches = _to_num_batches(num_batches)
        if self._dataloader is None:
            raise RuntimeError(
                f"dataloader_len={num_batches} is set without a dataloader. Call "
                f"state.set_dataloader(dataloader, label, {num_batches}) instead."
            )
        length = length_or_none(self._dataloader)
        if length is not None and num_batches > length:
            warnings.warn(
                f"DataloaderNumBatchesWarning: dataloader_len={num_batches} is more than the {length} batches that "
                f"the dataloader has. Each epoch ends after {length} batches.",
                UserWarning,
                stacklevel=2,
            )
        # An epoch ends with the dataloader at the latest.
        if num_batches < 0 or (length is not None and num_batches > length):
            self._dataloader_len = None if length is None else Time(length, TimeUnit.BATCH)
        else:
            self._dataloader_len = Time(num_batches, TimeUnit.BATCH)

    def set_dataloader(
        self,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: int | Time[int] = -1,
    ) -> None:
        """Set the dataloader of the current loop.

        Args:
            dataloader: Any iterable of batches, or `None`.
            dataloader_label: Its name. Required with a dataloader.
            dataloader_len: Number of batches per epoch; -1 uses the dataloader's length.
        """
        if dataloader is not None and dataloader_label is None:
            raise ValueError(
                f"The dataloader {dataloader!r} has no dataloader_label. Give one, such as 'train' or 'eval': metrics "
                f"and logs are named by it."
            )
        self._dataloader = dataloader
        self._dataloader_label = None if dataloader is None else dataloader_label
        self._dataloader_len = None
        if dataloader is not None:
            self.dataloader_len = dataloader_len

    @property
    def train_dataloader(self) -> Any:
        """The training dataloader. Assigning one resumes its dataset if `dataset_state` is pending."""
        return self._train_dataloader

    @train_dataloader.setter
    def train_dataloader(self, train_dataloader: Iterable[Any] | None) -> None:
        self._train_dataloader = train_dataloader
        resume_dataset(self)


if not TYPE_CHECKING:  # read at every batch; attrgetter avoids a Python call
    _length = DataSource.dataloader_len
    DataSource.dataloader_len = property(attrgetter("_dataloader_len"), _length.fset, doc=_length.__doc__)


def resume_dataset(source: DataSource) -> None:
    """Load the pending training dataset state, once."""
    dataset, waiting = dataset_of(source.train_dataloader), source.dataset_state
    if not waiting or waiting.get("train") is None or not hasattr(dataset, "load_state_dict"):
        return
    dataset.load_state_dict(waiting["train"])
    source.dataset_resumption["train"] = True
    source.dataset_state = {**waiting, "train": None}  # a copy, because the dict is the caller's


def dataset_of(dataloader: Any) -> Any:
    """Return the dataset of a dataloader, a `DataSpec` or an `Evaluator`, or `None` if it has none."""
    return getattr(innermost_dataloader(dataloader), "dataset", None)


def _to_num_batches(given: Any) -> int:
    if isinstance(given, Time):
        length = cast("Time[Any]", given)
        if length.unit is not TimeUnit.BATCH:
            raise ValueError(
                f"dataloader_len={str(length)!r} is not in batches. Give a number of batches, or -1 to use the length "
                f"of the dataloader."
            )
        return int(length)
    if not isinstance(given, SupportsIndex) or isinstance(given, bool):
        raise TypeError(
            f"dataloader_len={given!r} is not a number of batches. Give a whole number, a Time in batches, or -1 to "
            f"use the length of the dataloader."
        )
    return index(given)


_NOT_SAVED = "{} is not in the state_dict. Its state will not be restored."
# Loaded elsewhere, or meant for readers of the checkpoint.
_NOT_ATTRIBUTES = frozenset({"model", "integrations", "metadata"})


def load_all(
    state: State,
    saved: Mapping[str, Any],
    logger: Any,
    strict: bool,
    exclude_algorithms: Sequence[str] | None,
    algorithm_passes: Sequence[Any] | None,
) -> None:
    """Load the model first, because loading it may add algorithms, then the rest in the same order on all ranks."""
    saved = _with_todays_names(saved)
    if "model" in saved:
        load_model(state, saved, logger, strict, exclude_algorithms, algorithm_passes)
    # Sorted, because some loaders are collective and ranks must not call them in different orders.
    for name in sorted(saved):
        if name not in state.serialized_attributes or name in _NOT_ATTRIBUTES:
            continue
        load = _LOADERS.get(name)
        if load is not None:
            load(state, saved[name])
            continue
        try:
            setattr(state, name, saved[name])
        except AttributeError:  # saved by an older release, now a read-only property
            continue


def load_model(
    state: State,
    saved: Mapping[str, Any],
    logger: Any,
    strict: bool,
    exclude_algorithms: Sequence[str] | None,
    algorithm_passes: Sequence[Any] | None,
) -> None:
    """Apply the algorithms that changed the saved model, then load its weights."""
    saved = _with_todays_names(saved)
    algorithms: Any = saved.get("algorithms")
    # Old checkpoints have a dict, which does not record the order in which the algorithms were applied.
    if algorithms and not isinstance(algorithms, Mapping):
        apply_required_algorithms(
            state,
            cast("Sequence[Any]", algorithms),
            logger,
            exclude_algorithms or (),
            DEFAULT_PASSES if algorithm_passes is None else algorithm_passes,
        )
    weights: Mapping[str, Any] = saved["model"] or {}  # only rank 0 may have read them
    # DDP's prefix, which checkpoints of old releases kept.
    if saved.get("is_model_ddp") and not state.is_model_ddp:
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    set_model_state(
        state.model, weights, state.fsdp_state_dict_type, strict=strict, broadcast=state.load_monolith_rank0_only
    )


def load_optimizers(state: State, saved: Mapping[str, Any], strict: bool) -> None:
    """Load the state of every optimizer that the checkpoint contains. Every rank must call this."""
    states: Mapping[str, Any] = saved["optimizers"] or {}  # only rank 0 may have read them
    broadcast = state.load_monolith_rank0_only
    for name, optimizer in named_by_class(state.optimizers):
        # Loading is collective, so all ranks must take the same branch. With a broadcast rank 0 alone has the states;
        # otherwise every rank needs its own.
        is_missing = not any_rank(name in states) if broadcast else any_rank(name not in states)
        if is_missing:
            _warn(_NOT_SAVED.format(name))
            continue
        set_optimizer_state(
            state.model,
            optimizer,
            states.get(name, {}),
            state.fsdp_state_dict_type,
            strict=strict,
            broadcast=broadcast,
        )


def _with_todays_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of old checkpoints, some of which began with an underscore."""
    renamed = {"_is_model_ddp_wrapped": "is_model_ddp"}
    todays = {renamed.get(name, name).removeprefix("_"): value for name, value in saved.items()}
    metrics: Any = todays.pop("current_metrics", None)  # by label, including 'train'
    if metrics is not None:
        todays.setdefault("train_metrics", metrics.get("train", {}))
        todays.setdefault("eval_metrics", {label: value for label, value in metrics.items() if label != "train"})
    return todays


def _load_by_class(attribute: str) -> Callable[[State, Any], None]:
    def load(state: State, saved: Any) -> None:
        if isinstance(saved, Sequence):  # pairs of a name and a state, in their order
            pairs = cast("Sequence[tuple[str, Any]]", saved)
            # Numbered as in `named_by_class`, by which the states are looked up.
            saved = dict(zip(numbered([name for name, _ in pairs]), (value for _, value in pairs), strict=True))
        for name, item in named_by_class(ensure_tuple(getattr(state, attribute))):
            if name in saved:
                item.load_state_dict(saved[name])
            else:
                _warn(_NOT_SAVED.format(name))

    return load


def _load_algorithms(state: State, saved: Any) -> None:
    _load_by_class("algorithms")(state, saved)
    present = {type(algorithm).__qualname__ for algorithm in state.algorithms}
    if isinstance(saved, Mapping):  # in old checkpoints
        saved = list(cast("Mapping[str, Any]", saved).items())
    for name, own in cast("Sequence[tuple[str, Any]]", saved):
        algorithm_state = cast("Mapping[str, Any]", own if isinstance(own, Mapping) else {})
        # EMA's name for it: the trained weights are in its own state, which nothing reads if it is absent.
        if name not in present and algorithm_state.get("ema_weights_active"):
            _warn(
                f"The model in the checkpoint is the average of {name}, which is not among the algorithms: training "
                f"starts from the average rather than the trained weights. To resume, pass algorithms="
                f"[{algorithm_state.get('repr', name)}]. To start anew from the average, pass load_weights_only=True."
            )


def _load_timestamp(state: State, saved: Mapping[str, Any]) -> None:
    _load_by_class("timestamp")(state, saved)
    state.timestamp = state.timestamp.copy()  # a new object, so that caches by identity notice the change
    state.stopped_duration = saved.get(STOPPED_KEY)


def _load_dataset_state(state: State, saved: dict[str, Any] | None) -> None:
    state.dataset_state = saved
    resume_dataset(state)


_LOADERS: Mapping[str, Callable[[Any, Any], object]] = {
    "optimizers": lambda state, saved: state.load_optim_state({"optimizers": saved}),
    "schedulers": _load_by_class("schedulers"),
    "algorithms": _load_algorithms,
    "callbacks": _load_by_class("callbacks"),
    "scaler": _load_by_class("scaler"),
    "timestamp": _load_timestamp,
    "train_metrics": lambda state, saved: set_metric_states(state.train_metrics or {}, saved, state.device),
    "eval_metrics": lambda state, saved: [
        set_metric_states(metrics, saved.get(label, {}), state.device) for label, metrics in state.eval_metrics.items()
    ],
    "dataset_state": _load_dataset_state,
}


# Longer than the repr of any algorithm, and short enough not to exhaust Python's parser.
_MAX_LENGTH = 10_000


def apply_required_algorithms(
    state: State,
    saved: Sequence[Sequence[Any]],
    logger: Any,
    exclude: Collection[str],
    passes: Sequence[Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]],
) -> None:
    """Add the algorithms that the saved weights depend on, and apply them to the model."""
    names = [name for name, _ in saved]
    if unknown := [name for name in exclude if name not in names]:
        _warn(
            f"load_exclude_algorithms names {', '.join(map(repr, unknown))}, which the checkpoint does not have. It "
            f"has {', '.join(map(repr, names)) or 'no algorithms'}."
        )
    missing = list(_missing_algorithms(state, saved, exclude))
    if not missing:
        return
    # Order all algorithms together: an applied one that would have to come later is an error below.
    applied = [algorithm for algorithm in state.algorithms if algorithm.match(Event.INIT, state)]
    order: Sequence[Algorithm] = [*applied, *missing]
    for algorithm_pass in passes:
        order = algorithm_pass(order, Event.INIT)
    _refuse_wrong_order(order, applied, missing)
    added = [algorithm for algorithm in order if any(algorithm is one for one in missing)]
    for algorithm in added:
        state.algorithms.append(algorithm)
        _apply(algorithm, state, logger)
    plural, pronoun = ("s", "them") if len(added) > 1 else ("", "it")
    _warn(
        f"Automatically adding required_on_load algorithm{plural} {', '.join(map(repr, added))}, since the weights in "
        f"the checkpoint depend on {pronoun}. Pass load_exclude_algorithms="
        f"{[type(algorithm).__qualname__ for algorithm in added]} to leave {pronoun} out."
    )


def parse_algorithm(text: str, algorithm_class: type[Algorithm]) -> Algorithm:
    """Build an algorithm from its repr. The text comes from a file, so it is parsed and never evaluated.

    Args:
        text: One call of the class, with literals, `Event.X`, `TimeUnit.X` and `Time(...)` as arguments.
        algorithm_class: The only class that may be called.
    """
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"The text has {len(text)} characters, more than the {_MAX_LENGTH} that are read.")
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a Python expression.") from error
    name = algorithm_class.__qualname__
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name):
        raise ValueError(f"{text!r} is not a call of {name}.")
    return algorithm_class(*map(_value, call.args), **_keywords(call))


def _missing_algorithms(state: State, saved: Sequence[Sequence[Any]], exclude: Collection[str]) -> Iterator[Algorithm]:
    for name, algorithm_state in saved:
        if name in exclude:
            continue
        text = str(algorithm_state.get("repr", ""))
        # By name: a class that was redefined, as in a notebook, is not the class of an existing instance.
        present = [algorithm for algorithm in state.algorithms if type(algorithm).__qualname__ == name]
        if present:
            if present[0].required_on_load() and all(repr(algorithm) != text for algorithm in present):
                _warn(
                    f"required_on_load algorithm {name} was {text} when the checkpoint was written and is "
                    f"{present[0]!r} now. The present one is kept; the weights may not fit."
                )
            continue
        algorithm_class = _find_class(name)
        if algorithm_class is None or not algorithm_class.required_on_load():
            continue
        try:
            yield parse_algorithm(text, algorithm_class)
        except Exception as error:  # any error: the constructor may reject arguments from the file
            _warn(
                f"required_on_load algorithm {name} could not be rebuilt from {text[:200]!r} ({error}) and is left "
                f"out. If the weights do not fit, pass the algorithm to algorithms=."
            )


def _find_class(name: str) -> type[Algorithm] | None:
    # Classes that are already defined come first, since they need no import. Of several with the same name the newest
    # counts, and only classes that weights depend on.
    loaded = [own for own in _subclasses(Algorithm) if own.__qualname__ == name and own.required_on_load()]
    if loaded:
        return loaded[-1]
    for module in algorithm_modules():
        if name in getattr(module, "__all__", ()):
            found: Any = getattr(module, name)
            if isinstance(found, type) and issubclass(found, Algorithm):
                return found
    return None


def _subclasses(algorithm_class: type[Algorithm]) -> Iterator[type[Algorithm]]:
    for subclass in algorithm_class.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _refuse_wrong_order(order: Sequence[Algorithm], applied: Sequence[Algorithm], missing: Sequence[Algorithm]) -> None:
    # The algorithms changed the saved model in the order of the passes, so the same order must be possible here.
    early: list[Algorithm] = []
    for algorithm in order:
        if any(algorithm is one for one in missing):
            early.append(algorithm)
        elif early and any(algorithm is one for one in applied):
            raise ValueError(
                f"The checkpoint needs {early}, which the engine applies before {algorithm!r}, and that has been "
                f"applied to the model already. Pass all of them to algorithms=, or leave the former out with "
                f"load_exclude_algorithms={[type(one).__qualname__ for one in early]}."
            )


def _apply(algorithm: Algorithm, state: State, logger: Any) -> None:
    name = type(algorithm).__qualname__
    try:
        if algorithm.match(Event.INIT, state):
            algorithm.apply(Event.INIT, state, logger)
    except Exception as error:
        raise ValueError(
            f"The checkpoint needs {algorithm!r}, which could not be applied to the model: {error}. Change the model "
            f"to what it was when the checkpoint was written, or leave the algorithm out with "
            f"load_exclude_algorithms=[{name!r}]."
        ) from error


# The container types that a repr may contain, by AST node.
_CONTAINERS: Mapping[type[ast.expr], Callable[[Iterable[Any]], Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}
_ENUMS: Mapping[str, type[Event] | type[TimeUnit]] = {"Event": Event, "TimeUnit": TimeUnit}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="inf" | "nan" as name):
            return getattr(math, name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) | ast.Name() as operand):
            return -_value(operand)
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return _CONTAINERS[type(node)](map(_value, items))
        case ast.Dict(keys=keys, values=values) if None not in keys:  # None is an unpacked mapping
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.Attribute(value=ast.Name(id="Event" | "TimeUnit" as kind), attr=name):
            return _ENUMS[kind](name)
        case ast.Call(func=ast.Name(id="Time"), args=arguments):
            return Time(*map(_value, arguments), **_keywords(node))
        case _:
            raise _unreadable(node)


def _keywords(call: ast.Call) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _unreadable(call)
        keywords[keyword.arg] = _value(keyword.value)
    return keywords


def _unreadable(node: ast.expr) -> ValueError:
    return ValueError(
        f"{ast.unparse(node)!r} is not a value that is read from a checkpoint: only literals, Event.X, TimeUnit.X and "
        f"Time(...) are."
    )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
