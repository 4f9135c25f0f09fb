"""Warning categories of algorithms and deprecations, and a one-line format for warnings."""

__all__ = ["NoEffectWarning", "NotIntendedUseWarning", "VersionedDeprecationWarning", "warning_on_one_line"]


class NoEffectWarning(Warning):
    """An algorithm found nothing to act on; training continues without it."""


class NotIntendedUseWarning(Warning):
    """An algorithm, or a combination of algorithms, is used in an unintended way."""


class VersionedDeprecationWarning(DeprecationWarning):
    """A feature is deprecated and will be removed in a known version.

    Args:
        message: What is deprecated and what to use instead, in full sentences.
        remove_version: The first version without it.

    Example:
        >>> str(VersionedDeprecationWarning("`alpha` is now called `smoothing`.", remove_version="0.4.0"))
        '`alpha` is now called `smoothing`. It will be removed in version 0.4.0.'
    """

    def __init__(self, message: str, remove_version: str) -> None:
        # Both arguments go to the base, because copying and pickling call the class again with `self.args`.
        super().__init__(message, remove_version)
        self.message = message
        self.remove_version = remove_version

    def __str__(self) -> str:
        return f"{self.message} It will be removed in version {self.remove_version}."


def warning_on_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    r"""Format a warning as one line, for logs that mix the lines of many ranks: `warnings.formatwarning = ...`.

    Example:
        >>> warning_on_one_line("It is late.", UserWarning, "clock.py", 12)
        'UserWarning: It is late. (source: clock.py:12)\n'
    """
    return f"{category.__name__}: {message} (source: {filename}:{lineno})\n"
