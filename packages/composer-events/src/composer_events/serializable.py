"""The contract of what a checkpoint keeps; `composer_time` defines it, because a `Time` is kept too."""

from composer_time import Serializable

__all__ = ["Serializable"]
