"""Factorization: replacement of large matrices in a network with products of two smaller ones."""

from composer_algorithms.factorize.algorithm import (
    LOG_NUM_CONV2D_REPLACEMENTS_KEY,
    LOG_NUM_LINEAR_REPLACEMENTS_KEY,
    Factorize,
    apply_factorization,
)
from composer_algorithms.factorize.core import (
    FactorizedConv2d,
    FactorizedLinear,
    LowRankSolution,
    factorize_conv2d,
    factorize_matrix,
    factorizing_could_speedup,
)
from composer_algorithms.metadata import Metadata

__all__ = [
    "Factorize",
    "apply_factorization",
    "FactorizedConv2d",
    "FactorizedLinear",
    "factorizing_could_speedup",
    "LowRankSolution",
    "factorize_conv2d",
    "factorize_matrix",
    "LOG_NUM_CONV2D_REPLACEMENTS_KEY",
    "LOG_NUM_LINEAR_REPLACEMENTS_KEY",
    "METADATA",
]

METADATA = Metadata(
    name="Factorize",
    class_name="Factorize",
    functional="apply_factorization",
    tldr="Factorize GEMMs into smaller GEMMs",
    attribution="MosaicML",
    link="",
    domains=("cv", "nlp"),
    summary=(
        "Splits linear layers and convolutions into two with few channels between them, which takes less work where "
        "the weights are close to a matrix of low rank."
    ),
    use=(
        "Rarely helpful: more than 1% of accuracy for less than 5% of throughput with ResNet-50. Leave small layers "
        "alone (min_channels and min_features of 512 or more), and use latent sizes of 0.25 or less."
    ),
)
