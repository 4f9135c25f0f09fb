"""LayerNorm in low precision."""

from composer_algorithms.low_precision_layernorm import LowPrecisionLayerNorm, apply_low_precision_layernorm

__all__ = ["LowPrecisionLayerNorm", "apply_low_precision_layernorm"]
