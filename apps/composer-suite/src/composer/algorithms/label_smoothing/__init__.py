"""Softening targets towards the uniform distribution."""

from composer_algorithms.label_smoothing import LabelSmoothing, smooth_labels

__all__ = ["LabelSmoothing", "smooth_labels"]
