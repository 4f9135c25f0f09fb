"""Training on small images first."""

from composer_algorithms.progressive_resizing import ProgressiveResizing, resize_batch

__all__ = ["ProgressiveResizing", "resize_batch"]
