"""Settings as PyTorch's classes for the first version of FSDP have them, which `FSDPConfig` takes as well as names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy

from composer_dist import Precision
from composer_fsdp.mixed_precision import resolve_dtypes

__all__ = ["BACKWARD_PREFETCH_MAP", "SHARDING_MAP", "get_mixed_precision"]

SHARDING_MAP: dict[str, ShardingStrategy] = dict(ShardingStrategy.__members__)
"""How FSDP's first version shards, by the names that settings have for it."""
BACKWARD_PREFETCH_MAP: dict[str, BackwardPrefetch | None] = {"NONE": None, **BackwardPrefetch.__members__}
"""When FSDP's first version gathers what the backward pass needs next, by the names that settings have for it."""


def get_mixed_precision(
    precision: str | Precision,
    mixed_precision: str | Mapping[str, Any] = "DEFAULT",
    keep_low_precision_grads: bool = False,
) -> tuple[MixedPrecision, torch.dtype, torch.dtype, torch.dtype]:
    """Return the formats that a `mixed_precision` setting means, see `composer_fsdp.mixed_precision`.

    Args:
        precision: In which the run computes.
        mixed_precision: `'FULL'`, `'DEFAULT'`, `'PURE'`, or a dict.
        keep_low_precision_grads: Only told on; gradients are in float32 once they are reduced.

    Returns:
        All of them as PyTorch's own setting, and those of weights, of reductions and of buffers.

    Raises:
        ValueError: If the setting is none of these, or a format has no such name.

    Example:
        >>> get_mixed_precision("amp_bf16", "PURE")[1:]
        (torch.bfloat16, torch.bfloat16, torch.bfloat16)
    """
    dtypes = resolve_dtypes(mixed_precision, precision)
    setting = MixedPrecision(
        param_dtype=dtypes.param,
        reduce_dtype=dtypes.reduce,
        buffer_dtype=dtypes.buffer,
        keep_low_precision_grads=keep_low_precision_grads,
    )
    return setting, dtypes.param, dtypes.reduce, dtypes.buffer
