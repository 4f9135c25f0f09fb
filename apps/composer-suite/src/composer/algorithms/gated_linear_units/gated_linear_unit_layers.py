"""The feed-forward layer of BERT with a gate."""

from composer_algorithms.gated_linear_units import BERTGatedFFOutput

__all__ = ["BERTGatedFFOutput"]
