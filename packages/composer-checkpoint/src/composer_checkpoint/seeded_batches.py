"""Batches of a map-style dataset whose randomness follows from a seed, the epoch, the rank and their number alone."""

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from composer_checkpoint._drawless import draws_nothing
from composer_checkpoint._own_generators import holds_generators

__all__ = ["SeededBatches", "can_be_seeded", "derive_seed", "open_seeded", "seeded"]

_DRAW_FIRST = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
_END = object()
_spares: list[Any] = []  # bit generators of NumPy's, which take longer to make than a small batch to load


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**63 that follows from its parts, and has nothing in common with that of other parts.

    Example:
        >>> derive_seed(17, 0, 1) == derive_seed(17, 0, 1)
        True
        >>> derive_seed(17, 0, 1) == derive_seed(17, 1, 0)
        False
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let Python, NumPy and torch on the CPU draw from a seed inside, and go on as if nothing had been drawn.

    Only the second one of a pair of normal numbers, which `np.random` may have in store, is drawn anew. Devices are
    left alone. Where all generators are to be seeded, there is `composer_dist.reproducibility`.

    Example:
        >>> with seeded(3):
        ...     first = torch.rand(2)
        >>> with seeded(3):
        ...     torch.equal(first, torch.rand(2))
        True
    """
    python, ours = random.getstate(), torch.default_generator.get_state()
    # NumPy's own state takes longer to copy than a batch to load; another one takes its place meanwhile.
    legacy: Any = np.random  # whose stubs do not know how
    numpy, spare = legacy.get_bit_generator(), _spares.pop() if _spares else np.random.MT19937(0)
    legacy.set_bit_generator(spare)
    try:
        _seed_process(seed)
        yield
    finally:
        random.setstate(python)
        legacy.set_bit_generator(numpy)
        torch.default_generator.set_state(ours)
        _spares.append(spare)


def can_be_seeded(loader: object) -> bool:
    """Say whether a dataloader is torch's own over a map-style dataset, so that its batches can be told apart."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, (IterableDataset, IterDataPipe, MapDataPipe))
    )


def open_seeded(loader: Iterable[Any], epoch_seed: int, first: int = 0) -> Iterator[Any]:
    """Return the batches of any dataloader; what this process draws for them follows from a seed and their number.

    Args:
        loader: Begins where it likes.
        epoch_seed: The seed.
        first: The number of the batch that comes first.
    """
    with seeded(epoch_seed):
        batches = iter(loader)
    return _each_seeded(batches, epoch_seed, first)


class SeededBatches:
    """Reads a DataLoader from any batch on, without what comes before.

    What the order of an epoch and the workers' seeds are drawn from follows from `(seed, epoch, rank)`, and what a
    batch's augmentation is drawn from also from the batch's number. So neither the number of workers nor whether they
    persist matters, nothing that the model draws does, and a batch that is not wanted need not be loaded. Whatever
    draws from a generator of its own does so as always.

    Args:
        loader: One that `can_be_seeded`. It is not changed.
        rank: Tells this rank's augmentation from that of the others.
    """

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        self.loader = loader
        self._rank = rank
        self._sampler: _SeededSampler | None = None
        self._view: DataLoader[Any] | None = None

    def open(self, seed: int, epoch: int, first: int = 0) -> Iterator[Any]:
        """Return the batches of an epoch from the one with the number `first` on.

        Before the first one they are not loaded, unless the dataset holds generators of its own, which only loading
        brings forward.
        """
        epoch_seed = derive_seed(seed, epoch, self._rank)
        replays = first > 0 and holds_generators(self.loader.dataset, self.loader.collate_fn)
        view, sampler = self._prepare()
        sampler.begin(epoch_seed, 0 if replays else first)
        if self.loader.num_workers == 0 and not draws_nothing(self.loader.dataset, self.loader.collate_fn):
            batches = open_seeded(view, epoch_seed, 0 if replays else first)
        else:
            with seeded(epoch_seed):
                batches = iter(view)
        return islice(batches, first, None) if replays else batches

    def close(self) -> None:
        """End the workers that persist. Epochs may be opened again, with new ones."""
        batches = None if self._view is None else vars(self._view)["_iterator"]  # set only where workers persist
        self._view = None
        if batches is not None:
            # torch has no public way to end them, and those that it finds in garbage it waits for in vain.
            batches._shutdown_workers()

    def _prepare(self) -> tuple["DataLoader[Any]", "_SeededSampler"]:
        """Return a copy of the loader that goes through a sampler of ours, or the one whose workers wait."""
        if self._view is None or self._sampler is None or not self.loader.persistent_workers:
            batch_sampler = self.loader.batch_sampler
            is_batched = batch_sampler is not None
            self._sampler = _SeededSampler(self.loader.sampler if batch_sampler is None else batch_sampler)
            self._view = copy.copy(self.loader)
            # In its dict, since a DataLoader refuses to be given these once it is made. Its iterators ask for nothing
            # else; the workers of `_iterator`, if there are any, belong to the loader itself.
            own: dict[str, Any] = {"_iterator": None, "batch_sampler" if is_batched else "sampler": self._sampler}
            if self.loader.num_workers > 0:
                self._sampler.is_numbered = True
                own["dataset"] = _SeededDataset(self.loader.dataset)
            vars(self._view).update(own)
        return self._view, self._sampler


@dataclass(frozen=True, slots=True)
class _Numbered:
    """What is to be loaded, as the dataset is asked for it, and the seed to do it with."""

    seed: int
    index: Any


class _SeededSampler:
    """Passes on what another sampler says, from a given batch on, and draws what that draws from a seed."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._epoch_seed = 0
        self._first = 0
        self.is_numbered = False
        # Those of torch draw when they begin, or from a generator of their own.
        self._draws_first = type(sampler) in _DRAW_FIRST and type(getattr(sampler, "sampler", sampler)) in _DRAW_FIRST

    def begin(self, epoch_seed: int, first: int) -> None:
        self._epoch_seed, self._first = epoch_seed, first

    def __len__(self) -> int:
        return len(self._sampler)  # pyright: ignore[reportArgumentType]  # as long as the one that it stands for

    def __iter__(self) -> Iterator[Any]:
        epoch_seed, first = self._epoch_seed, self._first
        wanted = islice(self._draw(epoch_seed), first, None)
        if not self.is_numbered:
            return wanted
        return (_Numbered(derive_seed(epoch_seed, number), index) for number, index in enumerate(wanted, first))

    def _draw(self, epoch_seed: int) -> Iterator[Any]:
        """Yield all that the other sampler says, without a look at each where nothing is drawn any more."""
        indices: Iterator[Any] = iter(())
        for number in count():
            with seeded(derive_seed(epoch_seed, "order", number)):
                if number == 0:
                    indices = iter(self._sampler)
                index = next(indices, _END)
            if index is _END:
                return
            yield index
            if self._draws_first:
                yield from indices
                return


class _SeededDataset:
    """A dataset as workers see it: what it draws for a batch follows from the batch's seed."""

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_dataset", dataset)

    def __getitems__(self, batch: _Numbered) -> Any:
        _seed_process(batch.seed)
        together: Callable[[Any], Any] | None = getattr(self._dataset, "__getitems__", None)
        return together(batch.index) if together else [self._dataset[index] for index in batch.index]

    def __getitem__(self, item: Any) -> Any:
        if not isinstance(item, _Numbered):
            return self._dataset[item]
        _seed_process(item.seed)
        return self._dataset[item.index]

    def __len__(self) -> int:
        return len(self._dataset)

    # A worker_init_fn finds it as `get_worker_info().dataset`, reads its attributes and sets them.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _SeededDataset, (self._dataset,)


def _each_seeded(batches: Iterator[Any], epoch_seed: int, first: int) -> Iterator[Any]:
    """Load each batch in this process with its own seed."""
    for number in count(first):
        with seeded(derive_seed(epoch_seed, number)):
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def _seed_process(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
