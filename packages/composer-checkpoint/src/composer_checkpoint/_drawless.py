"""Whether loading a batch is known to draw nothing from the random number generators of the process."""

import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, default_convert

__all__ = ["draws_nothing"]

_PLAIN = (TensorDataset, list, tuple, range, torch.Tensor, np.ndarray, np.memmap)


def draws_nothing(dataset: Any, collate_fn: object) -> bool:
    """Say whether a dataset only looks up what it holds, and whether its samples are only stacked.

    What is not known to be so, such as any dataset of one's own or any transform, is assumed to draw.

    Example:
        >>> draws_nothing(TensorDataset(torch.rand(3)), default_collate)
        True
        >>> draws_nothing(TensorDataset(torch.rand(3)), lambda samples: samples)
        False
    """
    return (collate_fn is default_collate or collate_fn is default_convert) and _only_looks_up(dataset)


def _only_looks_up(dataset: Any) -> bool:
    # Of exactly these types, since whoever derives from them may do anything.
    if type(dataset) in _PLAIN:
        return True
    if type(dataset) is Subset:
        return _only_looks_up(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_only_looks_up, dataset.datasets))
    if type(dataset) is StackDataset:
        parts: Any = dataset.datasets
        return all(map(_only_looks_up, parts.values() if isinstance(parts, dict) else parts))
    hugging_face = sys.modules.get("datasets")
    if hugging_face is not None and type(dataset) is getattr(hugging_face, "Dataset", None):
        return dataset.format["type"] != "custom"  # which is what `set_transform` makes of it
    return False
