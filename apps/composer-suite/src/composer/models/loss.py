"""Former address of `composer.loss`."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_models import DiceLoss as DiceLoss
    from composer_models import binary_cross_entropy_with_logits as binary_cross_entropy_with_logits
    from composer_models import check_for_index_targets as check_for_index_targets
    from composer_models import ensure_targets_one_hot as ensure_targets_one_hot
    from composer_models import infer_target_type as infer_target_type
    from composer_models import loss_registry as loss_registry
    from composer_models import soft_cross_entropy as soft_cross_entropy

__all__ = [
    "DiceLoss",
    "binary_cross_entropy_with_logits",
    "soft_cross_entropy",
    "loss_registry",
    "infer_target_type",
    "ensure_targets_one_hot",
    "check_for_index_targets",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {},
    renamed={
        "DiceLoss": "composer.loss.DiceLoss",
        "binary_cross_entropy_with_logits": "composer.loss.binary_cross_entropy_with_logits",
        "soft_cross_entropy": "composer.loss.soft_cross_entropy",
        "loss_registry": "composer.loss.loss_registry",
        "infer_target_type": "composer.loss.utils.infer_target_type",
        "ensure_targets_one_hot": "composer.loss.utils.ensure_targets_one_hot",
        "check_for_index_targets": "composer.loss.utils.check_for_index_targets",
    },
)
