"""Losses that take targets as class indices and as probabilities."""

from composer_models import DiceLoss, binary_cross_entropy_with_logits, loss_registry, soft_cross_entropy

__all__ = ["DiceLoss", "binary_cross_entropy_with_logits", "soft_cross_entropy", "loss_registry"]
