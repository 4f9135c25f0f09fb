"""Stochastic depth: randomly skip residual blocks in training."""

from composer_algorithms.metadata import METHODS
from composer_algorithms.stochastic_depth.algorithm import StochasticDepth, apply_stochastic_depth
from composer_algorithms.stochastic_depth.layers import (
    BlockStochasticModule,
    make_resnet_basic_block_stochastic,
    make_resnet_bottleneck_stochastic,
)

__all__ = [
    "StochasticDepth",
    "apply_stochastic_depth",
    "BlockStochasticModule",
    "make_resnet_basic_block_stochastic",
    "make_resnet_bottleneck_stochastic",
    "METADATA",
]

METADATA = METHODS["stochastic_depth"]
