"""Functions of PIL images, applied to tensors as well."""

from composer_algorithms.augmentation import image_as_type, map_pillow_function

__all__ = ["image_as_type", "map_pillow_function"]
