"""Weights for a sharded model that was built on the meta device."""

from composer_fsdp.meta_init import initialize as meta_init

__all__ = ["meta_init"]
