"""The store through which the ranks once met, for what they tell each other beside their collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as tdist
from torch.distributed import distributed_c10d

__all__ = ["open_store"]


def open_store(key: str) -> Any:
    """Return a client of the store, with keys of its own.

    Args:
        key: What the keys begin with.
    """
    # PyTorch keeps the store for itself; one of our own would need a port of its own.
    shared = distributed_c10d._get_default_store()
    # A client of its own, since the calls of one client wait for each other.
    return tdist.PrefixStore(key, shared.clone())  # pyright: ignore[reportPrivateImportUsage]  # documented there
