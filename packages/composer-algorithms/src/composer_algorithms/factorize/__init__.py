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
from composer_algorithms.metadata import METHODS

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

METADATA = METHODS["factorize"]
