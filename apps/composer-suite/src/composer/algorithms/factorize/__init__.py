"""Large matrices as products of smaller ones."""

from composer_algorithms.factorize import (
    LOG_NUM_CONV2D_REPLACEMENTS_KEY,
    LOG_NUM_LINEAR_REPLACEMENTS_KEY,
    Factorize,
    FactorizedConv2d,
    FactorizedLinear,
    LowRankSolution,
    apply_factorization,
    factorize_conv2d,
    factorize_matrix,
    factorizing_could_speedup,
)

__all__ = [
    "Factorize",
    "FactorizedConv2d",
    "FactorizedLinear",
    "LOG_NUM_CONV2D_REPLACEMENTS_KEY",
    "LOG_NUM_LINEAR_REPLACEMENTS_KEY",
    "LowRankSolution",
    "apply_factorization",
    "factorize_conv2d",
    "factorize_matrix",
    "factorizing_could_speedup",
]
