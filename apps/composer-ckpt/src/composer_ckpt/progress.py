"""Progress bars with bytes and rate, on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(title: str, total_bytes: int, *, quiet: bool = False) -> Iterator[Callable[[int], object]]:
    """Yield a function that is called with the number of bytes after each step.

    The bar goes to the standard error, and is shown if that is a terminal.
    """
    from tqdm import tqdm  # here, so that help does not wait for it

    hidden = quiet or not sys.stderr.isatty()
    with tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        yield bar.update
