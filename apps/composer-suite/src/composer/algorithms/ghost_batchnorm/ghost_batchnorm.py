"""Batch normalization of parts of the batch."""

from composer_algorithms.ghost_batchnorm import (
    GhostBatchNorm,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    _GhostBatchNorm,  # noqa: F401  # users' tests look for it
    apply_ghost_batchnorm,
)

__all__ = ["GhostBatchNorm", "GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d", "apply_ghost_batchnorm"]
