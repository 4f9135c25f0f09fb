"""Layers that blur before they sample down."""

from composer_algorithms.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d
from composer_algorithms.blurpool.layers import _default_2d_filter  # noqa: F401  # users' tests read it

__all__ = ["BlurConv2d", "BlurMaxPool2d", "BlurPool2d", "blur_2d", "blurmax_pool2d"]
