"""What the classes of algorithms ask for: read from the class, so that the order depends on nothing but the classes."""

from __future__ import annotations

from typing import Any

from composer_events.algorithm import Algorithm


def surgery_rank(algorithm: object) -> int:
    """Return the place among others on INIT."""
    return _class_value(algorithm, "surgery_rank", Algorithm.surgery_rank)


def class_says(algorithm: object, attribute: str) -> bool:
    """Answer whether an attribute of the class is true."""
    return _class_value(algorithm, attribute, False) is True


def is_named(algorithm: object, *names: str) -> bool:
    """Answer whether the class, or one that it derives from, has one of the names."""
    return any(base.__name__ in names for base in algorithm.__class__.__mro__)


def asks_for_precedence(algorithm: object) -> bool:
    """Answer whether the class names any that it has to be before or after."""
    return bool(_class_value(algorithm, "runs_before", ()) or _class_value(algorithm, "runs_after", ()))


def precedence(first: object, second: object) -> str:
    """Return what asks for the first algorithm to be before the second one, and nothing where nothing does."""
    if is_named(second, *_class_value(first, "runs_before", ())):
        return f"{first.__class__.__name__}.runs_before"
    if is_named(first, *_class_value(second, "runs_after", ())):
        return f"{second.__class__.__name__}.runs_after"
    return ""


def conflict(first: object, second: object) -> str:
    """Return why the first algorithm does not go with the second one, and nothing where it does."""
    reasons = _class_value(first, "conflicts_with", {})
    return next((reasons[name] for name in reasons if is_named(second, name)), "")


def _class_value(algorithm: object, attribute: str, default: Any) -> Any:
    return getattr(algorithm.__class__, attribute, default)
