"""Base class of objects whose state is stored in checkpoints."""

from __future__ import annotations

__all__ = ["Serializable"]

# Importing typing takes about as long as all of composer_time. Type checkers treat this name specially without the
# import, here and in the other modules.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Serializable:
    """Base class of objects that can be saved to and restored from a dictionary.

    The base stores nothing: its `state_dict` is empty and loading does nothing. A subclass with state overrides both.

    Example:
        >>> class Counter(Serializable):
        ...     count = 0
        ...     def state_dict(self):
        ...         return {"count": self.count}
        ...     def load_state_dict(self, state):
        ...         self.count = state["count"]
        >>> saved, restored = Counter(), Counter()
        >>> saved.count = 3
        >>> restored.load_state_dict(saved.state_dict())
        >>> restored.count
        3
    """

    __slots__ = ()  # so that Time and Timestamp can have slots; other subclasses still get a __dict__

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to restore this object; empty unless overridden."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this object from the result of its `state_dict`; does nothing unless overridden.

        Args:
            state: The dictionary returned by `state_dict` of the same class.
        """
