"""Which samples this rank reads."""

from typing import Any

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer_dist.env import get_global_rank, get_world_size

__all__ = ["get_sampler"]


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> "DistributedSampler[int]":
    """Return the sampler that gives this rank its share of a map-style dataset.

    A process that is alone gets the whole dataset, so the same line serves one rank and many. The `batch_size` of the
    loader that takes the sampler counts the samples of one rank.

    Args:
        dataset: Of the same length on every rank.
        drop_last: Drop the samples that do not divide evenly, instead of repeating some.
        shuffle: Draw a new order each epoch; needs `sampler.set_epoch(epoch)` before each, which a Trainer calls.
        num_replicas: How many shares there are. The world size when `None`.
        rank: Which share to take. This process's rank when `None`.
        seed: What the order is drawn from. The same on every rank.

    Raises:
        TypeError: If the dataset is an `IterableDataset`, such as a `StreamingDataset`, which gives each rank its share
            by itself.

    Example:
        >>> list(get_sampler(range(5), num_replicas=2, rank=1, drop_last=True))
        [1, 3]
    """
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"dataset={dataset!r} is an IterableDataset, which says itself what each rank and each worker reads, and a "
            "sampler is for datasets that are asked for samples by number. Give it to its DataLoader without a sampler."
        )
    return DistributedSampler(
        dataset,
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
