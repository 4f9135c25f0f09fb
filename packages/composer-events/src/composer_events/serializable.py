"""`Serializable`, the protocol of objects in checkpoints; defined in `composer_time`, because `Time` implements it."""

from composer_time import Serializable

__all__ = ["Serializable"]
