"""Lengths, units and the clock of training."""

from composer_time import Time, Timestamp, TimeUnit, ensure_time

__all__ = ["Time", "Timestamp", "TimeUnit", "ensure_time"]
