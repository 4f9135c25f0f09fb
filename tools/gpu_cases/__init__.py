"""What `tools/gpu_check.py` runs on a machine with a GPU: one function a case.

Each takes a device, `'cuda'` or `'cpu'`, raises if something is not as it has to be, and returns a figure for the
table.
"""


class Skip(Exception):
    """Raised where a machine has not what a case needs; the message says what."""
