"""Bringing a `State` back from what `State.state_dict` gave."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from composer_events._data_source import resume_dataset
from composer_events._metric_layout import set_metric_states
from composer_events._model_layout import set_model_state
from composer_events._optimizer_layout import set_optimizer_state
from composer_events._ranks import any_rank
from composer_events._required_algorithms import apply_required_algorithms
from composer_events._state_dict import STOPPED_KEY, named_by_class
from composer_events.iter_helpers import ensure_tuple
from composer_events.passes import DEFAULT_PASSES

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = ["load_all", "load_model", "load_optimizers"]

# Loaded by other means, or kept for people to read.
_NOT_ATTRIBUTES = frozenset({"model", "integrations", "metadata"})


def load_all(
    state: State,
    saved: Mapping[str, Any],
    logger: Any,
    strict: bool,
    exclude_algorithms: Sequence[str] | None,
    algorithm_passes: Sequence[Any] | None,
) -> None:
    """Load the model first, since it decides what the rest fits to, and the rest in one order on all ranks."""
    saved = _with_todays_names(saved)
    if "model" in saved:
        load_model(state, saved, logger, strict, exclude_algorithms, algorithm_passes)
    for name in sorted(saved):
        if name not in state.serialized_attributes or name in _NOT_ATTRIBUTES:
            continue
        load = _LOADERS.get(name)
        if load is not None:
            load(state, saved[name])
            continue
        try:
            setattr(state, name, saved[name])
        except AttributeError:  # an attribute that is computed by now has nothing to restore
            continue


def load_model(
    state: State,
    saved: Mapping[str, Any],
    logger: Any,
    strict: bool,
    exclude_algorithms: Sequence[str] | None,
    algorithm_passes: Sequence[Any] | None,
) -> None:
    """Redo the surgery that the saved model went through, then load its weights."""
    saved = _with_todays_names(saved)
    algorithms: Any = saved.get("algorithms")
    # A dict, the form of old checkpoints, does not say in which order they were applied.
    if algorithms and not isinstance(algorithms, Mapping):
        apply_required_algorithms(
            state,
            cast("Sequence[Any]", algorithms),
            logger,
            exclude_algorithms or (),
            DEFAULT_PASSES if algorithm_passes is None else algorithm_passes,
        )
    weights: Mapping[str, Any] = saved["model"] or {}  # rank 0 may be the only one that has read them
    if saved.get("is_model_ddp") and not state.is_model_ddp:
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    set_model_state(
        state.model, weights, state.fsdp_state_dict_type, strict=strict, broadcast=state.load_monolith_rank0_only
    )


def load_optimizers(state: State, saved: Mapping[str, Any], strict: bool) -> None:
    """Load every optimizer that the checkpoint has. Every rank must call this."""
    states: Mapping[str, Any] = saved["optimizers"] or {}  # rank 0 may be the only one that has read them
    broadcast = state.load_monolith_rank0_only
    for name, optimizer in named_by_class(state.optimizers):
        is_missing = not any_rank(name in states) if broadcast else any_rank(name not in states)
        if is_missing:
            _warn_not_saved(name)
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
    """Read the keys of old checkpoints, some of which began with an underscore."""
    renamed = {"_is_model_ddp_wrapped": "is_model_ddp"}
    todays = {renamed.get(name, name).removeprefix("_"): value for name, value in saved.items()}
    metrics: Any = todays.pop("current_metrics", None)  # by label, training's among them
    if metrics is not None:
        todays.setdefault("train_metrics", metrics.get("train", {}))
        todays.setdefault("eval_metrics", {label: value for label, value in metrics.items() if label != "train"})
    return todays


def _load_by_class(attribute: str) -> Callable[[State, Any], None]:
    def load(state: State, saved: Mapping[str, Any]) -> None:
        for name, item in named_by_class(ensure_tuple(getattr(state, attribute))):
            if name in saved:
                item.load_state_dict(saved[name])
            else:
                _warn_not_saved(name)

    return load


def _load_timestamp(state: State, saved: Mapping[str, Any]) -> None:
    _load_by_class("timestamp")(state, saved)
    state.timestamp = state.timestamp.copy()  # who has seen the old one takes it for another time
    state.stopped_duration = saved.get(STOPPED_KEY)


def _load_algorithms(state: State, saved: Any) -> None:
    if not isinstance(saved, Mapping):
        saved = _numbered(cast("Sequence[Sequence[Any]]", saved))
    _load_by_class("algorithms")(state, saved)


def _numbered(saved: Sequence[Sequence[Any]]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for name, value in saved:
        count = sum(1 for key in states if key.partition("#")[0] == name)
        states[f"{name}#{count}" if count else name] = value
    return states


def _load_optimizers(state: State, saved: Any) -> None:
    state.load_optim_state({"optimizers": saved})


def _load_train_metrics(state: State, saved: Mapping[str, Any]) -> None:
    set_metric_states(state.train_metrics or {}, saved, state.device)


def _load_eval_metrics(state: State, saved: Mapping[str, Any]) -> None:
    for label, metrics in state.eval_metrics.items():
        set_metric_states(metrics, saved.get(label, {}), state.device)


def _load_dataset_state(state: State, saved: dict[str, Any] | None) -> None:
    state.dataset_state = saved
    resume_dataset(state)


_LOADERS: Mapping[str, Callable[[Any, Any], None]] = {
    "optimizers": _load_optimizers,
    "schedulers": _load_by_class("schedulers"),
    "algorithms": _load_algorithms,
    "callbacks": _load_by_class("callbacks"),
    "scaler": _load_by_class("scaler"),
    "timestamp": _load_timestamp,
    "train_metrics": _load_train_metrics,
    "eval_metrics": _load_eval_metrics,
    "dataset_state": _load_dataset_state,
}


def _warn_not_saved(name: str) -> None:
    warnings.warn(f"{name} is not in the state_dict. Its state will not be restored.", UserWarning, stacklevel=2)
