"""Where a run stands in its data, so that a resumed one reads the very same batches."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from composer_dist.env import get_global_rank
from composer_dist.reproducibility import load_rng_state

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["EPOCH_START_KEY", "LOADER_KEY", "DataPosition", "keeps_own_state", "set_epoch"]

EPOCH_START_KEY = "epoch_start"
"""In each entry of a checkpoint's `rng`: what the batches of the epoch depended on when it began."""

LOADER_KEY = "train_dataloader"
"""In a checkpoint's `dataset_state`: the state of each rank's dataloader, where it has one."""


_ATTRIBUTE = "data_position"


class DataPosition:
    """Opens epochs, and after a resumption opens the one that was left in the middle where it was left.

    The order of an epoch's batches, and the augmentation in worker processes, follow from the random numbers that were
    drawn when it began; augmentation in this process from those drawn at each batch. Both are kept, for each rank. An
    epoch is opened again as it was the first time, what was trained on is read and dropped, and then the generators
    are put where they were. Dataloaders and datasets that have `state_dict` and `load_state_dict` go to their place
    by themselves.

    What a dataloader's `persistent_workers` draw follows from all epochs before, and is not repeated.

    A loop of one's own attaches one to its state before it loads, so that `CheckpointSaver` and `load_checkpoint` find
    it, and begins each epoch with `open`.

    Args:
        spin: Whether to read and drop what was trained on. Without that, and without a dataloader that knows its
            place, the rest of the epoch has other batches.

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
        self._loader_state: Any = None
        self._is_resumed = False

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
        entry = rng[rank] if rng and rank < len(rng) else {}
        self._start = entry.get(EPOCH_START_KEY)
        waiting = (state.dataset_state or {}).get(LOADER_KEY) or []
        self._loader_state = waiting[rank] if rank < len(waiting) else None

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
        knows_place = self._hand_over(loader) or bool(state.dataset_resumption.get("train"))
        is_spun = self.spin and not knows_place
        if is_resumed and (num_read == 0 or knows_place or is_spun):
            self._begin_again(loader, epoch if is_spun and num_read else 0)
        if num_read == 0 or not is_resumed:
            self._start = _capture(loader)
        set_epoch(loader, epoch)
        batches = iter(loader)
        if is_spun:
            for _ in range(num_read):
                next(batches, None)
        if rng is not None and (knows_place or is_spun):
            load_rng_state(rng)
        return batches

    def forget(self) -> None:
        """Act as if no checkpoint had been loaded, for a run that begins again from zero."""
        self._rng = self._loader_state = self._start = None
        self._is_resumed = False

    def state_dict(self, state: "State") -> dict[str, Any]:
        """Return what this rank needs to go on from here: what the batches of the open epoch depend on."""
        if state.timestamp.batch_in_epoch > 0:
            return dict(self._start or {})
        generators = [generator.get_state() for generator in _generators(state.train_dataloader)]
        return {"generators": generators} if generators else {}

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
    """Say whether a dataloader, such as torchdata's `StatefulDataLoader`, knows where it stands."""
    return hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")


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
        "generators": [generator.get_state() for generator in _generators(loader)],
    }


def _restore(loader: Any, start: Mapping[str, Any]) -> None:
    for generator, generator_state in zip(_generators(loader), start.get("generators", ()), strict=False):
        generator.set_state(generator_state)
    if "torch" in start:
        version, internal, gauss = start["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(start["numpy"]))
        torch.random.set_rng_state(start["torch"])


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a dataloader and its samplers draw from instead of the process's own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
