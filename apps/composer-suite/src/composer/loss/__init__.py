"""Losses that take targets as class indices and as probabilities."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_models import DiceLoss as DiceLoss
    from composer_models import binary_cross_entropy_with_logits as binary_cross_entropy_with_logits
    from composer_models import loss_registry as loss_registry
    from composer_models import soft_cross_entropy as soft_cross_entropy

__all__ = ["DiceLoss", "binary_cross_entropy_with_logits", "soft_cross_entropy", "loss_registry"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {"composer_models": __all__},
    submodules=["loss", "utils"],
)
