"""Layers that are products of two smaller ones."""

from composer_algorithms.factorize import FactorizedConv2d, FactorizedLinear, factorizing_could_speedup

__all__ = ["FactorizedConv2d", "FactorizedLinear", "factorizing_could_speedup"]
