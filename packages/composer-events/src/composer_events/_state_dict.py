"""The layout in which `State` goes into a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer_events._metric_layout import get_metric_states
from composer_events._model_layout import unwrapped
from composer_events._ranks import get_world_size
from composer_events.env_info import get_composer_env_dict
from composer_events.iter_helpers import ensure_tuple

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = ["SERIALIZED_ATTRIBUTES", "STOPPED_KEY", "build_state_dict", "named_by_class"]

STOPPED_KEY = "stopped_duration"  # next to the timestamp, of which it is a part: who leaves out one leaves out both

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
    """Collect everything that a run needs to go on. Every rank must call this where the model is sharded."""
    collected: dict[str, Any] = {}
    for name in state.serialized_attributes:
        collect = _COLLECTORS.get(name)
        collected[name] = getattr(state, name, None) if collect is None else collect(state)
    collected["integrations"] = _integrations(state)
    collected["metadata"] = _metadata(state)
    return {name: value for name, value in collected.items() if value is not None}


def named_by_class(objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Name each object by its class; the second of one class is `Name#1`, the third `Name#2`."""
    seen: dict[str, int] = {}
    for item in objects:
        name = type(item).__qualname__
        count = seen[name] = seen.get(name, -1) + 1
        yield (f"{name}#{count}" if count else name), item


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


def _collect_algorithms(state: State) -> list[tuple[str, Any]]:
    return [(type(algorithm).__qualname__, algorithm.state_dict()) for algorithm in state.algorithms]


def _collect_train_metrics(state: State) -> dict[str, Any] | None:
    if not state.save_metrics or state.train_metrics is None:
        return None
    return get_metric_states(state.train_metrics)


def _collect_eval_metrics(state: State) -> dict[str, Any] | None:
    if not state.save_metrics:
        return None
    return {label: get_metric_states(metrics) for label, metrics in state.eval_metrics.items()}


_COLLECTORS: Mapping[str, Callable[[Any], Any]] = {
    "model": lambda state: state.get_model_state_dict(),
    "optimizers": lambda state: state.get_optim_state_dict(),
    "schedulers": _collect_by_class("schedulers"),
    "algorithms": _collect_algorithms,
    "callbacks": _collect_by_class("callbacks"),
    "scaler": _collect_by_class("scaler"),
    "timestamp": _collect_timestamp,
    "train_metrics": _collect_train_metrics,
    "eval_metrics": _collect_eval_metrics,
    "dataset_state": lambda state: state._dataset_state_dict(),
}


def _integrations(state: State) -> dict[str, Any]:
    model = unwrapped(state.model)
    # By name: the class belongs to a package on a floor above.
    if any(base.__name__ == "HuggingFaceModel" for base in type(model).__mro__):
        return {"huggingface": model.get_metadata()}
    return {}


def _metadata(state: State) -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
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
    return metadata
