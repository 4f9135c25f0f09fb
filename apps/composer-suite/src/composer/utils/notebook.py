"""Detection of notebooks."""

import sys
from typing import Any

__all__ = ["is_notebook"]


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, such as Jupyter's or Colab's.

    IPython in a terminal does not count.
    """
    ipython: Any = sys.modules.get("IPython")  # not imported here: a kernel has already imported it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
