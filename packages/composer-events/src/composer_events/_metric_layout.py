"""Metrics in a checkpoint: what they have accumulated and what they last answered."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["get_metric_states", "set_metric_states"]


def get_metric_states(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the state of torchmetrics metrics by name."""
    states: dict[str, Any] = {}
    for name, metric in metrics.items():
        metric.persistent(True)  # torchmetrics leaves the accumulated values out of state_dict otherwise
        states[name] = {"state_dict": metric.state_dict(), "_computed": getattr(metric, "_computed", None)}
    return states


def set_metric_states(metrics: Mapping[str, Any], states: Mapping[str, Any], device: Any) -> None:
    """Load what `get_metric_states` gave into the metrics of the same names; others are passed over.

    Also read are the forms of older checkpoints: whole metric objects (0.13.5 and before), and NumPy arrays in place
    of tensors (0.14 to 0.16).

    Args:
        metrics: Changed in place and moved to the device.
        states: By name.
        device: A `Device`, or anything else to leave the metrics where they are.
    """
    for name, metric in metrics.items():
        if name not in states:
            continue
        state_dict, computed = _read(states[name])
        metric.persistent(True)
        incompatible = metric.load_state_dict(state_dict, strict=False)
        for kind, keys in (("lacks", incompatible.missing_keys), ("has unknown", incompatible.unexpected_keys)):
            if keys:
                warnings.warn(
                    f"The saved state of the metric {name!r} {kind} values {list(keys)}. They are not restored, so "
                    f"the metric begins them afresh.",
                    UserWarning,
                    stacklevel=2,
                )
        metric._computed = computed
        metric._update_count += 1  # compute() warns about a metric that was never updated
        if hasattr(device, "module_to_device"):
            device.module_to_device(metric)


def _read(state: Any) -> tuple[dict[str, Any], Any]:
    if isinstance(state, Mapping):
        saved = cast("Mapping[str, Any]", state)
        values: Mapping[str, Any] = saved["state_dict"]
        return {key: _to_tensor(value) for key, value in values.items()}, _to_tensor(saved.get("_computed"))
    state.persistent(True)
    return dict(state.state_dict()), getattr(state, "_computed", None)


def _to_tensor(value: Any) -> Any:
    # By name: NumPy is not needed to have no arrays.
    if type(value).__module__ != "numpy":
        return value
    import torch

    return torch.as_tensor(value)
