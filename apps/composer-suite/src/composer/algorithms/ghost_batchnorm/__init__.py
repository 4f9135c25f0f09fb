"""Batch normalization of parts of the batch."""

from composer_algorithms.ghost_batchnorm import GhostBatchNorm, apply_ghost_batchnorm

__all__ = ["GhostBatchNorm", "apply_ghost_batchnorm"]
