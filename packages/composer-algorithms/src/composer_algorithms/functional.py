"""The methods as functions, for a training loop of your own: `import composer_algorithms.functional as cf`."""

from composer_algorithms.ema import compute_ema
from composer_algorithms.label_smoothing import smooth_labels
from composer_algorithms.mixup import mixup_batch

__all__ = ["compute_ema", "mixup_batch", "smooth_labels"]
