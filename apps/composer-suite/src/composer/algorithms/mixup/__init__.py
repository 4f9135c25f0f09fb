"""Blending pairs of examples."""

from composer_algorithms.mixup import MixUp, mixup_batch

__all__ = ["MixUp", "mixup_batch"]
