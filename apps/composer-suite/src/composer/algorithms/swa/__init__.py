"""Averaging the weights of the last part of training."""

from composer_algorithms.swa import SWA

__all__ = ["SWA"]
