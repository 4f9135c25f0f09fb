"""A model that computes next to nothing."""

from composer_algorithms.no_op_model import NoOpModel, NoOpModelClass

__all__ = ["NoOpModel", "NoOpModelClass"]
