"""Boxes of one image in another."""

from composer_algorithms.cutmix import (
    CutMix,
    _adjust_lambda,  # noqa: F401  # users' tests call these four
    _gen_cutmix_coef,  # noqa: F401
    _gen_indices,  # noqa: F401
    _rand_bbox,  # noqa: F401
    cutmix_batch,
)

__all__ = ["CutMix", "cutmix_batch"]
