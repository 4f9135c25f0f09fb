"""What a profiler does with what it is shown."""

from composer_time import StringEnum

__all__ = ["ProfilerAction"]


class ProfilerAction(StringEnum):
    """What a profiler does during one batch. A marker records while the action is one of its own.

    Example:
        >>> ProfilerAction("active_and_save")
        <ProfilerAction.ACTIVE_AND_SAVE: 'active_and_save'>
    """

    SKIP = "skip"
    """Record nothing."""
    WARMUP = "warmup"
    """Record and throw away, so that the cost of starting is over when it counts."""
    ACTIVE = "active"
    """Record."""
    ACTIVE_AND_SAVE = "active_and_save"
    """Record, and save what was recorded since the last time at the end of the batch."""
