"""What algorithms warn with."""

from composer_events.warnings import NoEffectWarning, NotIntendedUseWarning

__all__ = ["NoEffectWarning", "NotIntendedUseWarning"]
