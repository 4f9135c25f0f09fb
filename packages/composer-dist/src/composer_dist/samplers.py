"""Samplers with an order of their own, which share a dataset among ranks as `get_sampler` does."""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from composer_dist.env import get_global_rank, get_world_size

__all__ = ["LengthCurriculumSampler", "RepeatedAugmentationSampler"]


class _ShuffledSampler(DistributedSampler[int]):
    """Draw a permutation in each epoch, for samples that depend on their position in the order of all ranks.

    All ranks together read the same samples in the same order, however many they are.
    """

    def __init__(
        self, dataset: Dataset[Any], drop_last: bool, num_replicas: int | None, rank: int | None, seed: int
    ) -> None:
        super().__init__(
            dataset,
            num_replicas=get_world_size() if num_replicas is None else num_replicas,
            rank=get_global_rank() if rank is None else rank,
            seed=seed,
            drop_last=drop_last,
        )
        self._length = len(dataset)  # pyright: ignore[reportArgumentType]  # as DistributedSampler requires

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Return this rank's positions in the order of all ranks, and the epoch's permutation of the dataset."""
        order = torch.randperm(self._length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        # Not arange from the rank, which may be more than the size.
        return torch.arange(self.total_size)[self.rank :: self.num_replicas], order


class RepeatedAugmentationSampler(_ShuffledSampler):
    """Repeat each sample several times in a batch, for a dataset that augments it differently each time.

    The repeats are consecutive in the order of all ranks, which take turns: they are in the same batch, or in the
    batches of several ranks for the same step. A batch over all ranks whose size `num_repeats` does not divide
    shares samples with the next one. An epoch has as many batches as with `get_sampler`, so it reads a random share
    `1 / num_repeats` of the dataset.

    Args:
        dataset: A map-style dataset of the same length on every rank, with random augmentation.
        num_repeats: How many times each sample is read; at least 1.
        drop_last: See `get_sampler`.
        num_replicas: See `get_sampler`.
        rank: See `get_sampler`.
        seed: See `get_sampler`. Each epoch has its own order; call `set_epoch` before each, as a Trainer does.

    Raises:
        ValueError: If `num_repeats` is less than 1.

    Example:
        >>> list(RepeatedAugmentationSampler(range(4), num_repeats=2))
        [0, 0, 1, 1]

    Reference:
        Hoffer et al., "Augment your batch: better training with larger batches", 2019, arXiv:1901.09335, which adds
        the repeats to the batch and reads the whole dataset in each epoch. Here they are part of the batch, as in
        Berman et al., "MultiGrain: a unified image embedding for classes and instances", 2019, arXiv:1902.05509.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_repeats: int = 3,
        *,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, drop_last, num_replicas, rank, seed)
        self.num_repeats = operator.index(num_repeats)
        if num_repeats < 1:
            raise ValueError(f"num_repeats={num_repeats!r} must be at least 1; 1 reads each sample once.")

    def __iter__(self) -> Iterator[int]:
        """Return the samples of this rank in the current epoch."""
        positions, order = self._draw()
        return iter(order[positions // self.num_repeats % len(order)].tolist())


class LengthCurriculumSampler(_ShuffledSampler):
    """Read short samples first, then from a growing share of the dataset, and finally all of it.

    After the fraction `t` of the curriculum, samples are drawn from the shortest
    `sqrt(t * (1 - initial_fraction**2) + initial_fraction**2)` of the dataset. Later epochs read every sample once.
    Every epoch has as many batches as with `get_sampler`; during the curriculum, short samples are read more than once
    and some long ones not at all. The order depends only on the seed, the epoch and the place in it, so that a resumed
    run continues it.

    Args:
        dataset: A map-style dataset of the same length on every rank.
        lengths: The length of each sample, such as its number of tokens. Other measures of difficulty work as well.
        num_epochs: Length of the curriculum in epochs, which need not be a whole number. 0 shuffles only.
        initial_fraction: Share of the dataset to start with, above 0 and at most 1.
        drop_last: See `get_sampler`.
        num_replicas: See `get_sampler`.
        rank: See `get_sampler`.
        seed: See `get_sampler`. Each epoch has its own order; call `set_epoch` before each, as a Trainer does.

    Raises:
        ValueError: If `lengths` is not one number for each sample, `num_epochs` is negative or not finite, or
            `initial_fraction` is not above 0 and at most 1.

    Example:
        >>> texts = ["one", "a long text", "a", "four", "longer"]
        >>> sampler = LengthCurriculumSampler(texts, [len(text) for text in texts], initial_fraction=0.5)
        >>> [texts[index] for index in sampler]
        ['four', 'a', 'a', 'four', 'one']

    Reference:
        Platanios et al., "Competence-based Curriculum Learning for Neural Machine Translation", NAACL 2019,
        arXiv:1903.09848, with the square root. The paper draws with replacement; here a permutation is scaled to the
        share.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lengths: Sequence[float] | Tensor,
        num_epochs: float = 1.0,
        initial_fraction: float = 0.01,
        *,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, drop_last, num_replicas, rank, seed)
        if len(lengths) != self._length:
            raise ValueError(
                f"lengths has {len(lengths)} entries, and the dataset {self._length} samples: pass one for each."
            )
        known = torch.as_tensor(lengths)
        if known.ndim != 1 or known.isnan().any():
            raise ValueError(
                f"lengths must be one number for each sample, and not NaN; got shape {tuple(known.shape)} with "
                f"{int(known.isnan().sum())} NaN."
            )
        if not 0 <= num_epochs < math.inf:
            raise ValueError(f"num_epochs={num_epochs!r} must be 0 or more, and finite.")
        if not 0 < initial_fraction <= 1:
            raise ValueError(f"initial_fraction={initial_fraction!r} must be above 0 and at most 1.")
        self.num_epochs = num_epochs
        self.initial_fraction = initial_fraction
        self._by_length = known.argsort(stable=True)

    def __iter__(self) -> Iterator[int]:
        """Return the samples of this rank in the current epoch."""
        positions, order = self._draw()
        epochs = self.epoch + positions.double() / max(1, self.total_size)
        left = (1 - epochs / self.num_epochs).clamp(min=0) if self.num_epochs else torch.zeros_like(epochs)
        # Exactly 1 at the end, so that each sample is then read once.
        share = (1 - left * (1 - self.initial_fraction**2)).sqrt()
        return iter(self._by_length[(order[positions % len(order)] * share).long()].tolist())
