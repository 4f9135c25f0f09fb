"""Steps towards flat minima."""

from composer_algorithms.sam import SAM, SAMOptimizer

__all__ = ["SAM", "SAMOptimizer"]
