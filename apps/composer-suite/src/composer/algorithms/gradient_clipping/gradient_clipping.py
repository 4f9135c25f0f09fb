"""Bounding gradients."""

from composer._lazy import share_patches
from composer_algorithms.gradient_clipping import (
    GradientClipping,
    _apply_agc,  # noqa: F401  # users' tests patch it
    _get_clipped_gradient_coeff,  # noqa: F401  # users' tests call it
    _unitwise_norm,  # noqa: F401  # and this
    apply_gradient_clipping,
)

__all__ = ["GradientClipping", "apply_gradient_clipping"]

share_patches(__name__, "composer_algorithms.gradient_clipping", ["_apply_agc"])
