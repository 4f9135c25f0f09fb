"""Training on the examples with a large loss."""

from composer_algorithms.selective_backprop import SelectiveBackprop, select_using_loss, should_selective_backprop

__all__ = ["SelectiveBackprop", "select_using_loss", "should_selective_backprop"]
