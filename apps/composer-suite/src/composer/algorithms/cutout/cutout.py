"""Blacking out squares of images."""

from composer_algorithms.cutout import (
    CutOut,
    _generate_mask,  # noqa: F401  # users' tests call it
    cutout_batch,
)

__all__ = ["CutOut", "cutout_batch"]
