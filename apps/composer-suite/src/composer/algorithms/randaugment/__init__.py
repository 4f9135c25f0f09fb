"""Changing each image in random ways."""

from composer_algorithms.randaugment import RandAugment, RandAugmentTransform, randaugment_image

__all__ = ["RandAugment", "RandAugmentTransform", "randaugment_image"]
