"""Numbers of bytes as people write them."""

import re

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_BY_NAME = {name.lower(): size for name, size in _UNITS.items()}


def parse_bytes(text: str | int) -> int:
    """Return how many bytes a text such as `'80GiB'` means. `'80G'` is gibibytes, as the names of devices mean it.

    Raises:
        ValueError: If it is no number with a unit, or not more than 0.

    Example:
        >>> parse_bytes("1.5KiB"), parse_bytes("2 kB"), parse_bytes("1k")
        (1536, 2000, 1024)
    """
    match = _WRITTEN.fullmatch(str(text))
    unit = "" if match is None else match[2].lower()
    factor = _BY_NAME.get(f"{unit}ib" if len(unit) == 1 and unit in "kmgt" else unit or "b")
    size = 0 if match is None or factor is None else int(float(match[1]) * factor)
    if size <= 0:
        raise ValueError(
            f"{text!r} is no amount of memory. Give a number above 0 and one of {', '.join(_UNITS)}, such as '80GiB'."
        )
    return size


def format_bytes(size: float) -> str:
    """Return a number of bytes in the largest binary unit that it fills.

    Example:
        >>> format_bytes(1536), format_bytes(80 * 2**30)
        ('1.5 KiB', '80.0 GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"
