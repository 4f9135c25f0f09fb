"""Dataloaders of recipes, whose batch sizes count the samples of all ranks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from composer_dist import dist

__all__ = ["dataloader", "text"]


def dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool = False,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
    collate_fn: Any = None,
    seed: int | None = None,
) -> DataLoader[Any]:
    """Return a dataloader of this rank's share of a dataset.

    Args:
        dataset: A dataset of the same length on every rank, or an `IterableDataset` that splits itself over ranks.
        batch_size: The number of samples in a batch of all ranks together.
        shuffle: Draw a new order each epoch.
        drop_last: Drop an incomplete last batch.
        num_workers, pin_memory, collate_fn: As in `torch.utils.data.DataLoader`.
        seed: Seed of the order.

    Raises:
        ValueError: If the ranks cannot share a batch equally.
    """
    size, left = divmod(batch_size, dist.get_world_size())
    if left or not size:
        raise ValueError(
            f"{batch_size=} must be a multiple of the number of ranks, {dist.get_world_size()}: it counts the samples "
            "of all ranks."
        )
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=drop_last, seed=seed or 0)
    return DataLoader(
        dataset,
        batch_size=size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=collate_fn,
    )


def text(
    dataset: Mapping[str, Any],
    batch_size: int,
    *,
    max_seq_len: int | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """Return a dataloader of token shards that were written with `streaming.MDSWriter`.

    Each sample has `tokens`: an array of integers, or the bytes of one with 64 bits for each.

    Args:
        dataset: Arguments of `streaming.StreamingDataset`, such as `local`, `remote`, `split` and `shuffle`, and
            optionally `max_seq_len`.
        batch_size: The number of samples in a batch of all ranks together.
        max_seq_len: The number of tokens after which a sample is cut off.
        drop_last, num_workers, pin_memory: As in `torch.utils.data.DataLoader`.

    Raises:
        ValueError: If the ranks cannot share a batch equally.
    """
    from streaming import StreamingDataset  # an optional package

    settings = dict(dataset)
    length = settings.pop("max_seq_len", max_seq_len)

    class Tokens(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            tokens: Any = super().__getitem__(at)["tokens"]
            array = np.frombuffer(tokens, np.int64) if isinstance(tokens, bytes) else np.asarray(tokens)
            ids = torch.from_numpy(array.astype(np.int64))[:length]
            return {"input_ids": ids, "labels": ids}

    size = max(batch_size // dist.get_world_size(), 1)
    settings.setdefault("batch_size", size)
    return dataloader(
        Tokens(**settings), batch_size, drop_last=drop_last, num_workers=num_workers, pin_memory=pin_memory
    )
