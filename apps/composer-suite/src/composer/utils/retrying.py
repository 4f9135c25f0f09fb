"""Trying again what may work the next time."""

from composer_checkpoint.retry import retry

__all__ = ["retry"]
