"""Enumerations whose members are text."""

from composer_time import StringEnum

__all__ = ["StringEnum"]
