"""Stochastic depth: randomly skip residual blocks in training."""

from composer_algorithms.metadata import Metadata
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

METADATA = Metadata(
    name="Stochastic Depth",
    class_name="StochasticDepth",
    functional="apply_stochastic_depth",
    tldr="Replaces residual blocks by versions that are randomly dropped or sampled during training",
    attribution="(Huang et al, 2016)",
    link="https://arxiv.org/abs/1603.09382",
    domains=("cv",),
    summary=(
        "Skips residual blocks at random in training, for whole batches or for single examples, and weighs each block "
        "by how often it was there in evaluation. It regularizes, and skipped blocks cost nothing."
    ),
    use=(
        "Start with drop_rate=0.1 and the linear distribution: 0.4% for ResNet-50 and ResNet-101 on ImageNet. "
        "Block-wise it makes training faster, sample-wise about 5% slower. Too much of it costs accuracy."
    ),
)
