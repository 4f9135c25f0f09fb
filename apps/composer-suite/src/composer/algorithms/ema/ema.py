"""Averaging weights over training."""

from composer_algorithms.ema import EMA, EMAParameters, compute_ema, get_model_context_manager

__all__ = ["EMA", "EMAParameters", "compute_ema", "get_model_context_manager"]
