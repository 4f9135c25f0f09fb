"""The warning that says when something goes away."""

from composer_events.warnings import VersionedDeprecationWarning

__all__ = ["VersionedDeprecationWarning"]
