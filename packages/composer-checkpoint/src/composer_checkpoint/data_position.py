"""Where a run stands in its data, so that a resumed one reads the very same batches."""

import inspect
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from composer_checkpoint.seeded_batches import SeededBatches, can_be_seeded, derive_seed, open_seeded
from composer_dist.env import get_global_rank, get_world_size
from composer_dist.reproducibility import load_rng_state

if TYPE_CHECKING:
    from composer_events import State

__all__ = [
    "EPOCH_START_KEY",
    "LOADER_KEY",
    "SEED_KEY",
    "DataPosition",
    "begin_next_epoch",
    "dataset_counts_samples",
    "keeps_own_state",
    "leave_epoch",
    "set_epoch",
]

EPOCH_START_KEY = "epoch_start"
"""In each entry of a checkpoint's `rng`: what the batches of the epoch depended on when it began."""

LOADER_KEY = "train_dataloader"
"""In a checkpoint's `dataset_state`: the state of each rank's dataloader, where it has one."""

SEED_KEY = "seed"
"""Under `EPOCH_START_KEY`: what the batches of the epoch are drawn from, where nothing else matters."""


_AT_SAVE = "generators_at_save"  # in each entry under `EPOCH_START_KEY`: where the dataloader's own ones were
_ATTRIBUTE = "data_position"


class DataPosition:
    """Opens epochs, and after a resumption opens the one that was left in the middle where it was left.

    The order and the augmentation of a DataLoader's batches over a map-style dataset follow from the run's seed, the
    epoch, the rank and the number of the batch, so that the batches that were trained on are not even loaded; see
    `SeededBatches`. Dataloaders and datasets that have `state_dict` and `load_state_dict` go to their place by
    themselves; what they draw in this process is drawn from the same seed. Of everything else, what the batches
    depend on is kept for each rank: an epoch is opened again with the random numbers that it began with, what was
    trained on is read and dropped, and the generators are put where they were.

    What the persistent workers of an iterable dataset draw follows from all epochs before, and is not repeated.

    A loop of one's own attaches one to its state before it loads, so that `CheckpointSaver` and `load_checkpoint` find
    it, and begins each epoch with `open`.

    Args:
        spin: Whether to leave out what was trained on. Without that, and without a dataloader that knows its place,
            the rest of the epoch has other batches.

    Example:
        >>> from composer_events import State
        >>> state = State(None, rank_zero_seed=1, device="cpu", train_dataloader=[1, 2, 3])
        >>> position = DataPosition.attach(state)
        >>> list(position.open(state))
        [1, 2, 3]
        >>> state.timestamp = state.timestamp.to_next_batch(samples=1)
        >>> list(position.open(state))
        [2, 3]
    """

    def __init__(self, spin: bool = True) -> None:
        self.spin = spin
        self._start: dict[str, Any] | None = None  # of the epoch that is open
        self._rng: Sequence[Mapping[str, Any]] | None = None  # loaded, and not yet put back
        self._at_save: Sequence[torch.Tensor] = ()  # of the dataloader's own generators, for the epoch that is open
        self._loader_state: Any = None
        self._is_resumed = False
        self._seeded: SeededBatches | None = None  # kept, since its workers may persist

    @classmethod
    def attach(cls, state: "State", spin: bool = True) -> "DataPosition":
        """Return a new one that whoever has the state finds."""
        position = vars(state)[_ATTRIBUTE] = cls(spin)
        return position

    @staticmethod
    def of(state: "State") -> "DataPosition | None":
        """Return the one that is attached to a state, if there is one."""
        return getattr(state, _ATTRIBUTE, None)

    def resume(self, rng: Sequence[Mapping[str, Any]] | None, state: "State") -> None:
        """Take over what a checkpoint says, to act on it when the next epoch is opened.

        Args:
            rng: What `load_checkpoint` returned.
            state: What it loaded.
        """
        rank = get_global_rank()
        self._rng, self._is_resumed = rng or None, True
        self._start = _epoch_start(rng or [{}], rank)
        self._at_save = (self._start or {}).get(_AT_SAVE, ())
        waiting = (state.dataset_state or {}).get(LOADER_KEY) or []
        # Those of another number of ranks say nothing about this rank's share.
        self._loader_state = waiting[rank] if len(waiting) == get_world_size() else None

    def restore_between_epochs(self, state: "State") -> None:
        """Put the generators where they were, if a checkpoint was loaded that was written between two epochs."""
        if self._rng is not None and state.timestamp.batch_in_epoch == 0:
            load_rng_state(self._rng)
            self._rng = None

    def open(self, state: "State", dataloader: Iterable[Any] | None = None) -> Iterator[Any]:
        """Return the rest of the current epoch, whose number and first batch the state's timestamp says.

        Args:
            state: The training state.
            dataloader: What to read; the state's train dataloader when `None`.
        """
        loader = state.train_dataloader if dataloader is None else dataloader
        epoch, num_read = int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch)
        self.restore_between_epochs(state)
        rng, self._rng = self._rng, None
        is_resumed, self._is_resumed = self._is_resumed, False
        if not is_resumed:
            self._at_save = ()
        knows_place = self._hand_over(loader) or bool(state.dataset_resumption.get("train"))
        is_spun = self.spin and not knows_place
        if is_resumed and (num_read == 0 or knows_place or is_spun):
            self._begin_again(loader, epoch if is_spun and num_read else 0)
        if num_read == 0 or not is_resumed:
            is_seeded = can_be_seeded(loader) or _has_place(loader)
            beside = {SEED_KEY: state.rank_zero_seed}
            self._start = _generators_state(loader, beside) if is_seeded else _capture(loader)
        set_epoch(loader, epoch)
        batches = self._read(loader, epoch, num_read if knows_place else 0, num_read if is_spun else 0)
        if rng is not None and (knows_place or is_spun):
            load_rng_state(rng)
        return batches

    def _read(self, loader: Any, epoch: int, place: int, num_left_out: int) -> Iterator[Any]:
        """Return the batches of an epoch but the first ones, which are not loaded where that changes nothing.

        Args:
            loader: What to read.
            epoch: The number of the epoch.
            place: The number of the batch that the loader, which knows its place, gives next.
            num_left_out: How many batches to leave out from there.
        """
        seed = (self._start or {}).get(SEED_KEY)
        if seed is not None and can_be_seeded(loader):
            if self._seeded is None or self._seeded.loader is not loader:
                self._seeded = SeededBatches(loader, get_global_rank())
            return self._seeded.open(seed, epoch, num_left_out)
        if seed is not None:
            batches = open_seeded(loader, derive_seed(seed, epoch, get_global_rank()), place)
        else:
            batches = iter(loader)
        for _ in range(num_left_out):
            next(batches, None)
        return batches

    def skip_to_end(self, dataloader: Iterable[Any]) -> None:
        """Leave an epoch that was resumed at its end, of which nothing is left to read, as if it had been read.

        What draws an epoch's order from a generator of its own begins to when the first batch is asked for.

        Args:
            dataloader: What the epoch was opened with.
        """
        _restore_generators(dataloader, self._at_save)

    def forget(self) -> None:
        """Act as if no checkpoint had been loaded, for a run that begins again from zero."""
        self._rng = self._loader_state = self._start = None
        self._is_resumed = False

    def close(self) -> None:
        """End the worker processes that persist between epochs. Epochs may be opened again, with new ones."""
        if self._seeded is not None:
            self._seeded.close()

    def state_dict(self, state: "State") -> dict[str, Any]:
        """Return what this rank needs to go on from here: what the batches of the open epoch depend on."""
        if state.timestamp.batch_in_epoch > 0:
            at_save = _generators_state(state.train_dataloader)["generators"]
            return {**(self._start or {}), **({_AT_SAVE: at_save} if at_save else {})}
        return _generators_state(state.train_dataloader) if _generators(state.train_dataloader) else {}

    def _hand_over(self, loader: Any) -> bool:
        """Let a dataloader with a state of its own take its place, and say whether it did."""
        loaded, self._loader_state = self._loader_state, None
        if loaded is None or not keeps_own_state(loader):
            return False
        loader.load_state_dict(loaded)
        return True

    def _begin_again(self, loader: Any, num_epochs: int) -> None:
        """Put the generators where they were when the epoch began, as far as that is known."""
        if self._start is not None:
            _restore(loader, self._start)
            return
        # Composer's checkpoints do not say; without dropout and augmentation, this draws what training has drawn.
        for earlier in range(num_epochs):
            set_epoch(loader, earlier)
            next(iter(loader), None)


def keeps_own_state(dataloader: Any) -> bool:
    """Say whether a dataloader, such as torchdata's `StatefulDataLoader`, knows where it stands.

    One whose dataset knows it, such as mosaicml-streaming's, need not be asked: the dataset is.
    """
    return _has_state(dataloader) and not dataset_counts_samples(dataloader)


def dataset_counts_samples(dataloader: Any) -> bool:
    """Say whether a dataloader's dataset, such as a `StreamingDataset`, finds its place by a number of samples."""
    dataset: Any = getattr(dataloader, "dataset", None)
    if not _has_state(dataset):
        return False
    try:
        inspect.signature(dataset.state_dict).bind(0, True)
    except TypeError:  # one without arguments is part of a StatefulDataLoader's
        return False
    return True


def begin_next_epoch(dataset_state: Any, state: "State") -> Any:
    """Return a StreamingDataset's state as it must be loaded.

    Such a dataset counts epochs as they begin, so that between two of them its state names the one that is over.
    """
    next_epoch = getattr(getattr(state.train_dataloader, "dataset", None), "next_epoch", None)
    if state.timestamp.batch_in_epoch > 0 or next_epoch is None or not isinstance(dataset_state, Mapping):
        return dataset_state
    is_over = dataset_state.get("epoch") == next_epoch - 1
    return {**dataset_state, "epoch": next_epoch} if is_over else dataset_state


def leave_epoch(state: "State", dataset_state: Any) -> None:
    """Go on with the next epoch, and let data that know their place, and were put into this one, do so too.

    Args:
        state: The training state, into which a checkpoint of inside an epoch was loaded.
        dataset_state: What the checkpoint says under this name.
    """
    state.timestamp = state.timestamp.to_next_epoch()
    state.dataset_state = None
    if not dataset_counts_samples(state.train_dataloader):
        return
    dataset: Any = getattr(state.train_dataloader, "dataset", None)
    train = dataset_state.get("train") if isinstance(dataset_state, Mapping) else None
    start = dataset.state_dict(0, True)
    if isinstance(train, Mapping) and "epoch" in train:
        # Not as the dataset counts, which the ranks of a node do together.
        start = {**start, "epoch": train["epoch"] + 1}
    dataset.load_state_dict(start)


def _epoch_start(rng: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any] | None:
    """Return what the batches of a rank depended on when the open epoch began."""
    if rank < len(rng):
        return rng[rank].get(EPOCH_START_KEY)
    # The saved run did not have this rank. The seed is that of all; generators are not, lest two ranks draw the same.
    first = rng[0].get(EPOCH_START_KEY) or {}
    return {SEED_KEY: first[SEED_KEY]} if SEED_KEY in first else {}


def _has_place(dataloader: Any) -> bool:
    return keeps_own_state(dataloader) or dataset_counts_samples(dataloader)


def _has_state(holder: Any) -> bool:
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


def set_epoch(dataloader: Iterable[Any], epoch: int) -> None:
    """Tell the DistributedSampler of a dataloader, if it has one, which epoch to shuffle for."""
    if isinstance(dataloader, DataLoader):
        for sampler in (dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None)):
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)
                return


def _capture(loader: Any) -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.random.get_rng_state(),
        **_generators_state(loader),
    }


def _generators_state(loader: Any, beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {**(beside or {}), "generators": [generator.get_state() for generator in _generators(loader)]}


def _restore(loader: Any, start: Mapping[str, Any]) -> None:
    _restore_generators(loader, start.get("generators", ()))
    if "torch" in start:
        version, internal, gauss = start["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(start["numpy"]))
        torch.random.set_rng_state(start["torch"])


def _restore_generators(loader: Any, states: Iterable[torch.Tensor]) -> None:
    for generator, generator_state in zip(_generators(loader), states, strict=False):
        generator.set_state(generator_state)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a dataloader and its samplers draw from instead of the process's own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
