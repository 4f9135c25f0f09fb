"""Blacking out squares of images."""

from composer_algorithms.cutout import CutOut, cutout_batch

__all__ = ["CutOut", "cutout_batch"]
