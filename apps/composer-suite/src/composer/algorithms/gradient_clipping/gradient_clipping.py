"""Bounding gradients."""

from composer_algorithms.gradient_clipping import GradientClipping, apply_gradient_clipping

__all__ = ["GradientClipping", "apply_gradient_clipping"]
