"""The contract of an object whose state goes into a checkpoint."""

from __future__ import annotations

__all__ = ["Serializable"]

# Importing typing costs about as much as all of composer_time. Type checkers know this name without it, here and in
# the modules beside this one.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Serializable:
    """Save and restore an object as a dictionary.

    The base keeps nothing: its `state_dict` is empty and loading does nothing. A subclass that has something to keep
    overrides both.

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

    __slots__ = ()  # lets Time and Timestamp have slots; a subclass that declares none gets its __dict__ as usual

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be kept to restore this object; nothing unless overridden."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this object from what its `state_dict` returned; nothing unless overridden.

        Args:
            state: The dictionary that `state_dict` of the same class returned.
        """
