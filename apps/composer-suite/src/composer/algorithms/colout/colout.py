"""Dropping rows and columns of images."""

from composer_algorithms.colout import ColOut, ColOutTransform, colout_batch

__all__ = ["ColOut", "ColOutTransform", "colout_batch"]
