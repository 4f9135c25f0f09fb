"""Residual blocks that are dropped at random."""

from composer_algorithms.stochastic_depth import StochasticDepth, apply_stochastic_depth

__all__ = ["StochasticDepth", "apply_stochastic_depth"]
