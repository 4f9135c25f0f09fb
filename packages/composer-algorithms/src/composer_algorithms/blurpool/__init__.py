"""BlurPool: blur before downsampling, so that small shifts of the image change the features less."""

from composer_algorithms.blurpool.algorithm import BlurPool, apply_blurpool
from composer_algorithms.blurpool.layers import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d
from composer_algorithms.metadata import METHODS

__all__ = [
    "BlurPool",
    "apply_blurpool",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "blur_2d",
    "blurmax_pool2d",
    "METADATA",
]

METADATA = METHODS["blurpool"]
