"""Trying again what may work the next time."""

from composer_checkpoint.stores.base import retry

__all__ = ["retry"]
