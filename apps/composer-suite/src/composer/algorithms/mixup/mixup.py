"""Blending pairs of examples."""

from composer_algorithms.mixup import (
    MixUp,
    _gen_mixing_coef,  # noqa: F401  # users' tests call it
    mixup_batch,
)

__all__ = ["MixUp", "mixup_batch"]
