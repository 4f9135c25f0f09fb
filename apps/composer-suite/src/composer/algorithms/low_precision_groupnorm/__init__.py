"""GroupNorm in low precision."""

from composer_algorithms.low_precision_groupnorm import LowPrecisionGroupNorm, apply_low_precision_groupnorm

__all__ = ["LowPrecisionGroupNorm", "apply_low_precision_groupnorm"]
