"""Methods that make training faster or better, as algorithms of the Trainer."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_algorithms.ema import EMA as EMA
    from composer_algorithms.label_smoothing import LabelSmoothing as LabelSmoothing
    from composer_algorithms.mixup import MixUp as MixUp

__all__ = ["EMA", "LabelSmoothing", "MixUp"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_algorithms.ema": ["EMA"],
        "composer_algorithms.label_smoothing": ["LabelSmoothing"],
        "composer_algorithms.mixup": ["MixUp"],
    },
    submodules=["ema", "label_smoothing", "mixup", "warnings"],
)
