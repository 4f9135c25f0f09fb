"""Refusing a tree in which two things would have one name, where a format has no nested ones."""

from typing import Any, Literal

import torch

from composer_checkpoint._joined_names import refuse_doubled
from composer_checkpoint.sharded._entries import refuse_unfit_entries
from composer_checkpoint.tensors.source import StoredTensor

__all__ = ["refuse_doubled_names"]


def refuse_doubled_names(tree: Any, target: Literal["dcp", "local"]) -> None:
    """Refuse two things of one name, once the keys on the way to them are joined as a format has them.

    Args:
        tree: Dicts and lists of `StoredTensor`s, tensors and plain data.
        target: `'dcp'` for sharded folders, which join keys by dots, or `'local'` for per-rank files, which join them
            by slashes.

    Raises:
        IncompatibleCheckpointError: With the keys on the way to both, or to one that is too long for a folder.
    """
    if target == "dcp":
        refuse_unfit_entries(tree, (StoredTensor, torch.Tensor))
    else:
        refuse_doubled(tree, (StoredTensor, torch.Tensor), "/", "the layout of per-rank files")
