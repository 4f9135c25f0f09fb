"""The one that calls algorithms and callbacks at events."""

from composer_events.engine import Engine, Trace, Traces

__all__ = ["Engine", "Trace", "Traces"]
