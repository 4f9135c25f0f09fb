# pyright: basic
"""Reproducible batches of a map-style dataset, which depend only on the seed, epoch, rank and batch number."""

import copy
import hashlib
import random
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from typing import Any, cast

try:
    import numpy as np
    import torch
    from torch.utils.data import (
        BatchSampler,
        ConcatDataset,
        DataLoader,
        IterableDataset,
        IterDataPipe,
        MapDataPipe,
        RandomSampler,
        SequentialSampler,
        StackDataset,
        Subset,
        SubsetRandomSampler,
        TensorDataset,
        WeightedRandomSampler,
        default_collate,
        default_convert,
        get_worker_info,
    )
    from torch.utils.data.distributed import DistributedSampler
except ImportError as error:
    raise ImportError("seeded batches need torch. Run `pip install 'composer-events[torch]'`.") from error

from composer_events._held_state import set_epoch_everywhere
from composer_events.arguments import loaded

__all__ = [
    "SeededBatches",
    "can_be_seeded",
    "derive_seed",
    "has_own_order",
    "open_seeded",
    "open_streamed",
    "reads_in_workers",
    "seeded",
]

# Samplers that draw all their random numbers at the start of an epoch, or from a generator that they seed there.
_DRAW_FIRST = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
_END = object()
_spares: list[Any] = []  # NumPy bit generators to reuse, since creating one takes longer than loading a small batch


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**63 that is derived from its parts, and independent of the seeds of other parts.

    Example:
        >>> derive_seed(17, 0, 1) == derive_seed(17, 0, 1)
        True
        >>> derive_seed(17, 0, 1) == derive_seed(17, 1, 0)
        False
    """
    # 63 bits, so that it fits into the signed tensor that the workers share.
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch on the CPU inside the context, and restore their states on exit.

    `np.random` may have cached the second of a pair of normal numbers; this number alone is drawn again on exit.
    Devices are not seeded; `composer_dist.reproducibility` seeds all generators.

    Example:
        >>> with seeded(3):
        ...     first = torch.rand(2)
        >>> with seeded(3):
        ...     torch.equal(first, torch.rand(2))
        True
    """
    python, ours = random.getstate(), torch.default_generator.get_state()
    # Copying NumPy's own state takes longer than loading a batch, so another bit generator takes its place.
    legacy: Any = np.random  # its stubs lack these functions
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
    """Return whether a loader is torch's `DataLoader` over a map-style dataset, so that its batches have numbers."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, (IterableDataset, IterDataPipe, MapDataPipe))
    )


def reads_in_workers(loader: object) -> bool:
    """Return whether persistent workers of torch's `DataLoader` hold copies of an iterable dataset."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.dataset, IterDataPipe)
        and loader.persistent_workers
    )


def has_own_order(loader: DataLoader[Any]) -> bool:
    """Return whether a dataloader's samplers are not torch's own."""
    return not _draws_first(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def open_seeded(loader: Iterable[Any], epoch_seed: int, numbers: Iterable[int]) -> Iterator[Any]:
    """Return the batches of any dataloader, each loaded with random numbers that are derived from its number.

    Args:
        loader: The dataloader, which may begin at any batch.
        epoch_seed: The seed.
        numbers: The numbers of the batches that the dataloader returns.
    """
    with seeded(epoch_seed):
        batches = iter(loader)
    return _each_within(batches, (seeded(derive_seed(epoch_seed, number)) for number in numbers))


def open_streamed(loader: Iterable[Any], epoch_seed: int) -> Iterator[Any]:
    """Return the batches of any dataloader, loaded with random numbers from a stream separate from the model's.

    The stream depends only on the seed and on what the dataloader itself seeds, not on what is drawn between batches.

    Args:
        loader: The dataloader, which is read from its start.
        epoch_seed: The seed.
    """
    if type(loader) in (list, tuple):  # draws nothing
        return iter(loader)
    stream = _Stream(epoch_seed)
    with stream:
        batches = iter(loader)
    return _each_within(batches, repeat(stream))


class SeededBatches:
    """Read a DataLoader from any batch on, without loading earlier ones.

    The order of an epoch and the seeds of workers are derived from `(seed, epoch, rank)`, and the augmentation of a
    batch also from its number. The data therefore depend neither on the number and persistence of workers nor on the
    model's random numbers, and batches can be skipped without loading them. Generators that belong to the dataset are
    not seeded.

    Args:
        loader: A dataloader for which `can_be_seeded` or `reads_in_workers` is true. It is not changed.
        rank: Makes this rank's augmentation differ from that of other ranks.
        sets_epoch: Whether persistent workers call `set_epoch` on their copies of the dataset when an epoch begins.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, *, sets_epoch: bool = False) -> None:
        self.loader = loader
        self._rank = rank
        self._sets_epoch = sets_epoch
        self._sampler: _SeededSampler | None = None
        self._view: DataLoader[Any] | None = None
        self._shared = torch.zeros(2, dtype=torch.int64)  # shared with the workers: the epoch and its seed
        if loader.num_workers > 0:
            self._shared.share_memory_()

    def open(
        self,
        seed: int,
        epoch: int,
        first: int = 0,
        lead: int | None = None,
        *,
        replays: bool = False,
        order: int | None = None,
    ) -> Iterator[Any]:
        """Return the batches of an epoch from number `first` on.

        Args:
            seed: The seed of the run.
            epoch: The number of the epoch.
            first: The number of the first batch to return. Earlier ones are not loaded.
            lead: Number of batches to load and drop from the start of the epoch, for state that a dataset creates on
                first access. Each batch is then loaded by the same worker as without a resume; by any when `None`.
            replays: Whether to load and drop all batches before `first`.
            order: The result of `order_of(first)` when the epoch was first read, to warn if it has changed.
        """
        epoch_seed = derive_seed(seed, epoch, self._rank)
        # Workers take batches in turn, so a start at a multiple of their number keeps each batch with its worker.
        start = 0 if replays else first - (0 if lead is None else first % (self.loader.num_workers or 1))
        lead = lead or 0
        # Reading from the start then loads no more batches than reading the lead and from `start`.
        if start <= lead:
            start = lead = 0
        view, sampler = self._prepare(epoch)
        sampler.begin(epoch_seed, start, lead, first, order)
        # In shared memory, since the workers of the earlier epochs persist and have no other way to learn of this one.
        self._shared[:] = torch.tensor([epoch if self._sets_epoch else -1, epoch_seed])
        # Seeding each batch takes time, which batches without random numbers need not spend.
        if self.loader.num_workers == 0 and not uses_no_rng(self.loader.dataset, self.loader.collate_fn):
            batches = open_seeded(view, epoch_seed, chain(range(lead), count(start)))
        else:
            with seeded(epoch_seed):
                batches = iter(view)
        if self.loader.num_workers == 0:
            sampler.skip()
        for _ in range(lead + first - start):
            next(batches, None)
        return batches

    def order_of(self, num_batches: int) -> int | None:
        """Return a hash of the sample indices in the first batches of the current epoch, or `None` if it is unknown."""
        return None if self._sampler is None else self._sampler.orders.get(num_batches)

    def close(self) -> None:
        """Stop persistent workers. Later epochs start new ones."""
        batches = None if self._view is None else vars(self._view)["_iterator"]  # only persistent workers set it
        self._view = None
        if batches is not None:
            # torch has no public way to stop them, and waits in vain for those that it finds in garbage collection.
            batches._shutdown_workers()

    def _prepare(self, epoch: int) -> tuple["DataLoader[Any]", "_SeededSampler"]:
        """Return a copy of the loader with a seeded sampler, or the existing copy if its workers persist."""
        if self._view is None or self._sampler is None or not self.loader.persistent_workers:
            batch_sampler = self.loader.batch_sampler
            is_batched = batch_sampler is not None
            num_ahead = self.loader.num_workers * (self.loader.prefetch_factor or 0)
            self._sampler = _SeededSampler(self.loader.sampler if batch_sampler is None else batch_sampler, num_ahead)
            self._view = copy.copy(self.loader)
            # Set in its dict, since a DataLoader does not allow assigning them; its iterators read nothing else. The
            # workers of the copied `_iterator`, if any, belong to the original loader.
            own: dict[str, Any] = {"_iterator": None}
            if not reads_in_workers(self.loader):
                own["batch_sampler" if is_batched else "sampler"] = self._sampler
            if self.loader.num_workers > 0:
                self._sampler.is_numbered = True
                own["dataset"] = _SeededDataset(self.loader.dataset, self.loader.collate_fn, self._shared, epoch)
            vars(self._view).update(own)
        return self._view, self._sampler


@dataclass(frozen=True, slots=True)
class _Numbered:
    """The index of a batch, with the seed for loading it."""

    seed: int
    index: Any


class _SeededSampler:
    """Yield the batches of another sampler from a given number on, with its random numbers drawn from a seed.

    Attributes:
        is_numbered: Whether each batch comes with its seed.
        orders: By number of batches, a hash of these first batches; the latest entries only.
    """

    def __init__(self, sampler: Iterable[Any], num_ahead: int) -> None:
        self._sampler = sampler
        self._num_ahead = num_ahead
        self._epoch_seed = self._start = self._lead = self._first = 0
        self._order: int | None = None
        self._indices: Iterator[Any] = iter(())
        self._head: list[Any] | None = None
        self.is_numbered = False
        self.orders: dict[int, int] = {}
        self._draws_first = _draws_first(sampler)
        inner: Any = getattr(sampler, "sampler", sampler)
        self._goes_on = isinstance(sampler, Iterator) or isinstance(inner, Iterator)

    def begin(self, epoch_seed: int, start: int, lead: int, first: int, order: int | None) -> None:
        self._epoch_seed, self._start, self._lead, self._first, self._order = epoch_seed, start, lead, first, order

    def __len__(self) -> int:
        return len(self._sampler)  # pyright: ignore[reportArgumentType]  # the same length as the wrapped sampler

    def __iter__(self) -> Iterator[Any]:
        self._indices, self._head = self._draw(self._epoch_seed), None
        if not self.is_numbered:
            return self._pass_on() if self._start else self._indices
        seed, numbers = self._epoch_seed, chain(range(self._lead), count(self._start))
        return (_Numbered(derive_seed(seed, number), index) for number, index in zip(numbers, self._pass_on()))  # noqa: B905

    def skip(self) -> None:
        """Draw the indices of the batches before the start, and keep those of the lead."""
        if self._head is None:
            self._head = list(islice(self._indices, self._start))[: self._lead]

    def _pass_on(self) -> Iterator[Any]:
        self.skip()
        yield from self._head or ()
        yield from self._indices

    def _draw(self, epoch_seed: int) -> Iterator[Any]:
        """Yield all batches of the other sampler, seeding each unless the sampler draws everything at its start."""
        with seeded(derive_seed(epoch_seed, "order", 0)):
            indices = iter(self._sampler)
            index = next(indices, _END)
        if self._draws_first:
            yield from () if index is _END else chain([index], indices)
            return
        self.orders = {0: 0}
        # A sampler that counts its epochs may do so after its last batch, which workers never ask for, so the end is
        # drawn ahead. Not from an iterator, which would lose an item of the next epoch.
        length = None if self._goes_on else _length_of(self._sampler)
        following = None
        for number in count(1):
            if index is _END:
                break
            if number == length:
                following = self._next(indices, epoch_seed, number)
            self._note_order(number, index)
            yield index
            index = self._next(indices, epoch_seed, number) if number != length else following
        self._check_order(self._first)

    def _next(self, indices: Iterator[Any], epoch_seed: int, number: int) -> Any:
        with seeded(derive_seed(epoch_seed, "order", number)):
            return next(indices, _END)

    def _note_order(self, number: int, index: Any) -> None:
        text = repr(index)
        text = "" if " at 0x" in text else text  # it contains an address, which differs between processes
        self.orders[number] = zlib.crc32(text.encode(), self.orders[number - 1])
        # Workers draw ahead of the batches that have been returned, for which `order_of` still needs its entries.
        self.orders.pop(number - self._num_ahead - 3, None)
        self._check_order(number)

    def _check_order(self, number: int) -> None:
        """Warn if the skipped batches differ from those that the interrupted run has read."""
        if self._order is None or number != self._first:
            return
        before, self._order = self._order, None  # warns once
        if self.orders.get(number) != before:
            warnings.warn(
                f"The sampler of train_dataloader, a {type(self._sampler).__name__}, has chosen other samples for the "
                f"{number} batches that the epoch began with than before the run was stopped: some samples are read "
                "twice and some not at all. Give it state_dict() and load_state_dict(state) for what its order depends "
                "on, or let its order follow from set_epoch(epoch).",
                stacklevel=2,
            )


def _draws_first(sampler: Any) -> bool:
    """Return whether a sampler is torch's own, which draws everything at its start or from its own generator."""
    return type(sampler) in _DRAW_FIRST and type(getattr(sampler, "sampler", sampler)) in _DRAW_FIRST


def _length_of(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except Exception:  # it has no length, or the length depends on another object
        return None


class _SeededDataset:
    """A dataset in the workers that seeds the process before it loads a batch.

    Args:
        dataset: The dataset.
        collate_fn: Kept in the worker too, so that its parts get the number of the epoch.
        shared: The epoch, or -1, and its seed.
        epoch: The epoch for which it was created.
    """

    def __init__(self, dataset: Any, collate_fn: Any, shared: torch.Tensor, epoch: int) -> None:
        parts = dataset, collate_fn
        # Not by assignment, which sets attributes of the dataset, see `__setattr__`.
        vars(self).update(_dataset=dataset, _seeded_parts=parts, _seeded_shared=shared, _seeded_epoch=epoch)

    def __getitems__(self, batch: _Numbered) -> Any:
        self._seeded_begin(batch.seed)
        together: Callable[[Any], Any] | None = getattr(self._dataset, "__getitems__", None)
        return together(batch.index) if together else [self._dataset[index] for index in batch.index]

    def __getitem__(self, item: Any) -> Any:
        if not isinstance(item, _Numbered):
            return self._dataset[item]
        self._seeded_begin(item.seed)
        return self._dataset[item.index]

    def __iter__(self) -> Iterator[Any]:
        worker: Any = get_worker_info()
        self._seeded_begin(derive_seed(int(self._seeded_shared[1]), worker.id))
        return iter(self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    # A `worker_init_fn` sees this object as `get_worker_info().dataset`, and may read and set the dataset's attributes.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, unpickling asks for attributes before `_dataset` is set, so that `__getattr__` would recurse.
        return _SeededDataset, (*self._seeded_parts, self._seeded_shared, self._seeded_epoch)

    def _seeded_begin(self, seed: int) -> None:
        """Call `set_epoch` on persistent copies if the epoch has changed, and seed the process."""
        epoch = int(self._seeded_shared[0])
        if epoch not in (-1, self._seeded_epoch):
            set_epoch_everywhere(self._seeded_parts, epoch)
            vars(self)["_seeded_epoch"] = epoch
        _seed_process(seed)


class _Stream:
    """RNG state of Python, NumPy and torch on the CPU, used inside the context and saved on exit."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.MT19937(seed)
        self._torch = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *error: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        python, ours, legacy = random.getstate(), torch.default_generator.get_state(), cast("Any", np.random)
        numpy = legacy.get_bit_generator()
        random.setstate(self._python)
        legacy.set_bit_generator(self._numpy)
        torch.default_generator.set_state(self._torch)
        self._python, self._numpy, self._torch = python, numpy, ours


def _each_within(batches: Iterator[Any], contexts: Iterable[AbstractContextManager[None]]) -> Iterator[Any]:
    """Load each batch in this process within a context."""
    for context in contexts:
        with context:
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def _seed_process(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy does not take more bits
    # Not `torch.manual_seed`, which also seeds the devices, and so would change the model's dropout.
    torch.default_generator.manual_seed(seed)


_PLAIN = (TensorDataset, list, tuple, range, torch.Tensor, np.ndarray, np.memmap)


def uses_no_rng(dataset: Any, collate_fn: object) -> bool:
    """Return whether a dataset only returns stored samples, and `collate_fn` only stacks them.

    All others, such as custom datasets or transforms, are assumed to draw random numbers.

    Example:
        >>> uses_no_rng(TensorDataset(torch.rand(3)), default_collate)
        True
        >>> uses_no_rng(TensorDataset(torch.rand(3)), lambda samples: samples)
        False
    """
    return (collate_fn is default_collate or collate_fn is default_convert) and _only_looks_up(dataset)


def _only_looks_up(dataset: Any) -> bool:
    # Exact types only, since a subclass may draw random numbers.
    if type(dataset) in _PLAIN:
        return True
    if type(dataset) is Subset:
        return _only_looks_up(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_only_looks_up, dataset.datasets))
    if type(dataset) is StackDataset:
        parts: Any = dataset.datasets
        return all(map(_only_looks_up, parts.values() if isinstance(parts, dict) else parts))
    # Looked up, since importing the package is slow, and no dataset is of its class if it was never imported.
    hugging_face = loaded("datasets")
    if hugging_face is not None and type(dataset) is getattr(hugging_face, "Dataset", None):
        return dataset.format["type"] != "custom"  # set by `set_transform`
    return False
