"""Residual blocks that are dropped at random."""

from composer_algorithms.stochastic_depth import StochasticDepth, apply_stochastic_depth, layer_mapping

_STOCHASTIC_LAYER_MAPPING = layer_mapping()

__all__ = ["StochasticDepth", "apply_stochastic_depth"]
