"""Mixing each image with changed versions of itself."""

from composer_algorithms.augmix import AugmentAndMixTransform, AugMix, augmix_image

__all__ = ["AugMix", "AugmentAndMixTransform", "augmix_image"]
