"""Activations that are computed again, or wait on the host."""

from composer_fsdp.activation import apply_ac

__all__ = ["apply_ac"]
