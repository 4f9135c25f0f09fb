"""Ways to initialise weights, by name."""

from composer_models import Initializer

__all__ = ["Initializer"]
