"""Residual blocks that are dropped at random."""

from composer_algorithms.stochastic_depth import BlockStochasticModule, make_resnet_bottleneck_stochastic

__all__ = ["BlockStochasticModule", "make_resnet_bottleneck_stochastic"]
