"""The methods as functions, for a training loop of your own: `from composer import functional as cf`."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_algorithms.ema import compute_ema as compute_ema
    from composer_algorithms.label_smoothing import smooth_labels as smooth_labels
    from composer_algorithms.mixup import mixup_batch as mixup_batch

__all__ = ["compute_ema", "smooth_labels", "mixup_batch"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_algorithms.ema": ["compute_ema"],
        "composer_algorithms.label_smoothing": ["smooth_labels"],
        "composer_algorithms.mixup": ["mixup_batch"],
    },
)
