"""The number formats that a model computes in."""

from composer_dist.devices import Precision, get_precision_context

__all__ = ["Precision", "get_precision_context"]
