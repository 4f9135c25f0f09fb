"""The warnings that say what an algorithm cannot do well, or what goes away and when."""

__all__ = ["NoEffectWarning", "NotIntendedUseWarning", "VersionedDeprecationWarning", "warning_on_one_line"]


class NoEffectWarning(Warning):
    """An algorithm found nothing to act on: the training goes on as if it were not there."""


class NotIntendedUseWarning(Warning):
    """An algorithm, or several together, are used in a way that they were not made for."""


class VersionedDeprecationWarning(DeprecationWarning):
    """Something still works, and a version that is known removes it.

    Args:
        message: What is deprecated and what to use in its place, in whole sentences.
        remove_version: The first version without it.

    Example:
        >>> str(VersionedDeprecationWarning("`alpha` is now called `smoothing`.", remove_version="0.4.0"))
        '`alpha` is now called `smoothing`. It will be removed in version 0.4.0.'
    """

    def __init__(self, message: str, remove_version: str) -> None:
        # Both arguments go to the base, which calls the class with them again when a warning is copied or pickled.
        super().__init__(message, remove_version)
        self.message = message
        self.remove_version = remove_version

    def __str__(self) -> str:
        return f"{self.message} It will be removed in version {self.remove_version}."


def warning_on_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    r"""Write a warning as one line, for logs in which the lines of many ranks mix: `warnings.formatwarning = ...`.

    Example:
        >>> warning_on_one_line("It is late.", UserWarning, "clock.py", 12)
        'UserWarning: It is late. (source: clock.py:12)\n'
    """
    return f"{category.__name__}: {message} (source: {filename}:{lineno})\n"
