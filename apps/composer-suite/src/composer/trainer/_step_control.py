"""How an optimizer is told not to step, and what a gradient scaler has told it."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def takes_none(optimizer: Optimizer) -> bool:
    """Say whether an optimizer undoes its step where a closure returns `None`, as SAM does."""
    return getattr(optimizer, "_step_supports_amp_closure", False)


def has_fused_step(optimizer: Optimizer) -> bool:
    """Say whether an optimizer's kernels look themselves at whether they may step."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def tell_device(optimizer: Any, found: Tensor | None) -> None:
    """Let a fused optimizer step only if `found` is 0, by the attributes through which GradScaler tells it."""
    if found is not None:
        optimizer.grad_scale, optimizer.found_inf = None, found
    elif hasattr(optimizer, "found_inf"):
        del optimizer.grad_scale, optimizer.found_inf


def overflow_of(scaler: Any, optimizer: Optimizer) -> Tensor:
    """Return more than 0 if the scaler has seen an overflow; it has no public way to ask."""
    per_device = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return torch.stack([found.to(next(iter(per_device))) for found in per_device.values()]).sum()
