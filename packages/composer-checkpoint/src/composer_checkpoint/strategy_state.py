"""Weights and optimizer state of a model that another engine, such as DeepSpeed's, has taken apart."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from composer_checkpoint._tree import map_tree
from composer_dist.strategy import Strategy

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["PARTS", "collect_parts", "load_parts", "name_of_optimizer", "owner_of"]

PARTS = ("model", "optimizers")
"""What a state dict has of them."""


def owner_of(state: "State") -> Strategy | None:
    """Return the strategy that has the whole weights, or `None` where the state itself can collect them.

    Raises:
        RuntimeError: If an engine has the weights and the state does not say which strategy it belongs to.
    """
    if not state.deepspeed_enabled:
        return None
    strategy = getattr(state, "strategy", None)
    if not isinstance(strategy, Strategy):
        raise RuntimeError(
            "DeepSpeed's engine has the weights, and state.strategy, which could collect them, is missing. Set it to "
            "the DeepSpeed strategy that prepared the model."
        )
    return strategy


def collect_parts(state: "State", strategy: Strategy, *, weights_only: bool) -> dict[str, Any]:
    """Return the whole weights and optimizer state, as a run without the engine has them. Every rank must call this.

    The optimizer's parameters are numbered in its own order.
    """
    parts: dict[str, Any] = {"model": strategy.model_state_dict(state.model)}
    if not weights_only:
        parts["optimizers"] = {
            name_of_optimizer(state, optimizer): map_tree(
                strategy.optimizer_state_dict(state.model, optimizer), _own_count
            )
            for optimizer in state.optimizers
        }
    return parts


def load_parts(state: "State", strategy: Strategy, saved: Mapping[str, Any], *, strict: bool) -> None:
    """Load what `collect_parts` or a run without the engine has saved. Every rank must call this."""
    if saved.get("model"):
        strategy.load_model_state_dict(state.model, saved["model"], strict=strict)
    if "optimizers" not in saved:
        return
    for optimizer in state.optimizers:
        name = name_of_optimizer(state, optimizer)
        if name in saved["optimizers"]:
            strategy.load_optimizer_state_dict(state.model, optimizer, saved["optimizers"][name])
        else:
            warnings.warn(
                f"{name} is not in the state_dict. Its state will not be restored.", UserWarning, stacklevel=2
            )


def _own_count(_: str, value: Any) -> Any:
    """Copy a count of steps, of which ZeRO keeps one for all: who loads it for each parameter must not share it."""
    return value.clone() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def name_of_optimizer(state: "State", optimizer: Any) -> str:
    """Return the class of the optimizer that the engine has wrapped."""
    return type(getattr(state.model, "basic_optimizer", optimizer)).__qualname__
