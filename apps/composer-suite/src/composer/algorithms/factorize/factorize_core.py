"""Small matrices that do what a large one does."""

from composer_algorithms.factorize import LowRankSolution, factorize_conv2d, factorize_matrix

__all__ = ["LowRankSolution", "factorize_conv2d", "factorize_matrix"]
