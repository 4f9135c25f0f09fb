"""Changes of single images."""

from composer_algorithms.augmentation import augmentation_sets, image_as_type, map_pillow_function

__all__ = ["augmentation_sets", "image_as_type", "map_pillow_function"]
