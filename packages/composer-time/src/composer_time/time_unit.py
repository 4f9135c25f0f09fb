"""What a length of training is counted in."""

from composer_time.string_enum import StringEnum

__all__ = ["TimeUnit"]


class TimeUnit(StringEnum):
    """Name what a length of training is counted in.

    A unit can be written by its value or its name, in any case: `TimeUnit('ep')`, `TimeUnit('epoch')`.

    Example:
        >>> TimeUnit("Batch").value
        'ba'
    """

    ITERATION = "iter"
    """A user-defined number of epochs or tokens."""
    EPOCH = "ep"
    """One pass over the training data."""
    BATCH = "ba"
    """What one optimizer step sees."""
    SAMPLE = "sp"
    """One example."""
    TOKEN = "tok"
    """One token."""
    DURATION = "dur"
    """A fraction of the whole training, the only unit that is not a whole number; 1 is the end."""
    SECOND = "sec"
    """One second of wall-clock time."""
