"""Activations that are computed again in the backward pass, where the model is not sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer.trainer._caller import level_of_user

if TYPE_CHECKING:
    from torch import nn

    from composer_fsdp import ParallelismConfig

__all__ = ["check_recomputation", "recompute_activations"]

_SELECTIVE = "selective"


def check_recomputation(setting: Any, parallelism_config: ParallelismConfig | None) -> bool | str:
    """Return what the argument `activation_checkpointing` says.

    Raises:
        ValueError: If it is none of what there is, or the settings of sharding have one of their own.
    """
    if not isinstance(setting, bool) and setting != _SELECTIVE:
        raise ValueError(
            f"activation_checkpointing={setting!r} is none that there is. Use True, False or {_SELECTIVE!r}, which "
            "keeps the results of matrix products."
        )
    if setting and parallelism_config is not None:
        raise ValueError(
            f"activation_checkpointing={setting!r} is for models that are not sharded. Write it into the settings of "
            f"sharding: parallelism_config={{'fsdp': {{'activation_checkpointing': {setting!r}}}}}."
        )
    return setting


def recompute_activations(model: nn.Module, setting: bool | str) -> None:
    """Let the modules that the model chooses compute their activations again, in place."""
    if not setting:
        return
    from composer_fsdp.activation import apply_ac, warn_of_none_chosen  # few use it

    if not apply_ac(model, setting, False):
        warn_of_none_chosen(model, stacklevel=level_of_user())
