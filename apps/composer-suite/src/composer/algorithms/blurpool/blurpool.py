"""Blurring before sampling down."""

from composer_algorithms.blurpool import BlurPool, apply_blurpool

__all__ = ["BlurPool", "apply_blurpool"]
