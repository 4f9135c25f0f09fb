"""Filters of mean 0 and variance 1."""

from composer_algorithms.weight_standardization import WeightStandardization, apply_weight_standardization

__all__ = ["WeightStandardization", "apply_weight_standardization"]
