"""Detection of notebooks."""

from composer_events.arguments import loaded

__all__ = ["is_notebook"]


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, such as Jupyter's or Colab's.

    IPython in a terminal does not count.
    """
    ipython = loaded("IPython")  # not imported here: a kernel has already imported it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
