"""Large matrices as products of smaller ones."""

from composer_algorithms.factorize import (
    LOG_NUM_CONV2D_REPLACEMENTS_KEY,
    LOG_NUM_LINEAR_REPLACEMENTS_KEY,
    Factorize,
    apply_factorization,
)

__all__ = ["Factorize", "LOG_NUM_CONV2D_REPLACEMENTS_KEY", "LOG_NUM_LINEAR_REPLACEMENTS_KEY", "apply_factorization"]
