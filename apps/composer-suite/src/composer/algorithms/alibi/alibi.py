"""Attention with linear biases."""

from composer_algorithms.alibi import Alibi, apply_alibi

__all__ = ["Alibi", "apply_alibi"]
