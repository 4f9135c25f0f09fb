"""The functions that older releases gave to `apply_alibi` for GPT-2."""

from composer_algorithms.alibi.surgery import _attn, enlarge_mask  # noqa: F401  # scripts import the former by this name

__all__ = ["enlarge_mask"]
