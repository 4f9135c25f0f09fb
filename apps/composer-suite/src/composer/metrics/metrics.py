"""Metrics for classification and segmentation."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_models import CrossEntropy as CrossEntropy
    from composer_models import Dice as Dice
    from composer_models import LossMetric as LossMetric
    from composer_models import MIoU as MIoU

__all__ = ["MIoU", "Dice", "CrossEntropy", "LossMetric"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {"composer_models": __all__},
    renamed={"CrossEntropyLoss": "composer.metrics.CrossEntropy"},
)
