"""Image augmentation primitives, from which RandAugment and AugMix choose."""

from composer_algorithms.augmentation.primitives import (
    AugmentationFunction,
    augmentation_sets,
    image_as_type,
    map_pillow_function,
)

__all__ = ["AugmentationFunction", "augmentation_sets", "image_as_type", "map_pillow_function"]
