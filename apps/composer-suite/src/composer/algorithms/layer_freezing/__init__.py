"""Training fewer and fewer layers."""

from composer_algorithms.layer_freezing import LayerFreezing, freeze_layers

__all__ = ["LayerFreezing", "freeze_layers"]
