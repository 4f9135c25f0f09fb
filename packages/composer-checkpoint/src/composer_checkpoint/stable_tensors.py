"""The tensors of a training state that nothing changes before the optimizer's next step."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["unchanged_until_step"]


def unchanged_until_step(state: "State") -> list[torch.Tensor]:
    """Return what nothing changes before the optimizer's next step, unless algorithms may."""
    if state.algorithms:
        return []
    stable: list[torch.Tensor] = list(state.model.parameters()) if hasattr(state.model, "parameters") else []
    for optimizer in state.optimizers:
        for of_parameter in getattr(optimizer, "state", {}).values():
            if isinstance(of_parameter, dict):
                stable += [value for value in of_parameter.values() if isinstance(value, torch.Tensor)]
    return stable
