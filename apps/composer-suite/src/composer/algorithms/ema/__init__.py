"""Averaging weights over training."""

from composer_algorithms.ema import EMA, compute_ema

__all__ = ["EMA", "compute_ema"]
