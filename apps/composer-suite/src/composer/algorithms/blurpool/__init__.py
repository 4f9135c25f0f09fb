"""Blurring before sampling down."""

from composer_algorithms.blurpool import (
    BlurConv2d,
    BlurMaxPool2d,
    BlurPool,
    BlurPool2d,
    apply_blurpool,
    blur_2d,
    blurmax_pool2d,
)

__all__ = ["BlurConv2d", "BlurMaxPool2d", "BlurPool", "BlurPool2d", "apply_blurpool", "blur_2d", "blurmax_pool2d"]
