"""GroupNorm in low precision."""

from composer_algorithms.low_precision_groupnorm import (
    LowPrecisionGroupNorm,
    LPGroupNorm,
    apply_low_precision_groupnorm,
)

__all__ = ["LPGroupNorm", "LowPrecisionGroupNorm", "apply_low_precision_groupnorm"]
