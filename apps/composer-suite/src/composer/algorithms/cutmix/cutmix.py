"""Boxes of one image in another."""

from composer_algorithms.cutmix import CutMix, cutmix_batch

__all__ = ["CutMix", "cutmix_batch"]
