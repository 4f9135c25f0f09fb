"""Where a run stands in its data, so that a resumed one reads the very same batches."""

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import count, islice
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer_checkpoint._held_state import HeldState, holds_generators, holds_state, set_epoch_everywhere
from composer_checkpoint._ranks import Ranks
from composer_checkpoint.errors import IncompatibleCheckpointError, shown
from composer_checkpoint.seeded_batches import (
    SeededBatches,
    can_be_seeded,
    derive_seed,
    draws_nothing,
    has_own_order,
    open_seeded,
    open_streamed,
    reads_in_workers,
)
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
    "TRAIN_DATA_KEY",
    "begin_epoch_again",
    "describe_train_data",
    "refuse_other_data",
]

EPOCH_START_KEY = "epoch_start"
"""In each entry of a checkpoint's `rng`: what the batches of the epoch depended on when it began."""

LOADER_KEY = "train_dataloader"
"""In a checkpoint's `dataset_state`: the state of each rank's dataloader, where it has one."""

SEED_KEY = "seed"
"""Under `EPOCH_START_KEY`: what the batches of the epoch are drawn from, where nothing else matters."""

# In each entry under `EPOCH_START_KEY`: what the parts of the dataloader held when the epoch began, and at the save,
_HELD, _AT_SAVE = "held", "held_at_save"
_ORDER = "order"  # with, there, a hash of the order of the epoch so far.
_ATTRIBUTE = "data_position"


class DataPosition:
    """Opens epochs, and after a resumption opens the one that was left in the middle where it was left.

    The order and the augmentation of a DataLoader's batches over a map-style dataset follow from the run's seed, the
    epoch, the rank and the number of the batch, so that the batches that were trained on are not even loaded; see
    `SeededBatches`. Dataloaders and datasets that have `state_dict` and `load_state_dict` go to their place by
    themselves; what they draw in this process is drawn from the same seed. Everything else is read from the start of
    the epoch, with random numbers of its own, and what was trained on is dropped.

    Generators and states that samplers, datasets and dataloaders hold, and the numbers that samplers count with, are
    kept for each rank, as they were when the epoch began and at the save; see `HeldState`. One warning names what
    cannot be brought back.

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
        self._at_save: Mapping[str, Any] = {}  # what the loaded checkpoint says about parts of the dataloader
        self._loader_state: Any = None
        self._is_resumed = False
        self._held: HeldState | None = None
        self._begun: tuple[Any, int, list[object]] | None = None  # of which epoch the parts have the number
        self._settings: dict[str, Any] = {}  # of the dataset, before listeners acted on the start of the epoch
        self._seeded: SeededBatches | None = None  # kept, since its workers may persist

    @classmethod
    def attach(cls, state: "State", spin: bool = True) -> "DataPosition":
        """Return a new one that whoever has the state finds."""
        position = vars(state)[_ATTRIBUTE] = cls(spin)
        if state.train_dataloader is not None:
            position.watch(state.train_dataloader)
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
        self._rng, self._is_resumed, self._begun = rng or None, True, None
        self._start = _epoch_start(rng or [{}], rank)
        self._at_save = (self._start or {}).pop(_AT_SAVE, {})
        waiting = (state.dataset_state or {}).get(LOADER_KEY) or []
        # Those of another number of ranks say nothing about this rank's share.
        self._loader_state = waiting[rank] if len(waiting) == get_world_size() else None

    def watch(self, loader: Any) -> HeldState:
        """Note what a dataloader holds before anyone acts on it: what changes from then on is kept in checkpoints."""
        if self._held is None or self._held.loader is not loader:
            self._held = HeldState(loader, only_generators=_has_place(loader))
        return self._held

    def restore_between_epochs(self, state: "State") -> None:
        """Put the generators where they were, if a checkpoint was loaded that was written between two epochs."""
        if self._rng is not None and state.timestamp.batch_in_epoch == 0:
            load_rng_state(self._rng)
            self._rng = None

    def begin(self, state: "State", dataloader: Iterable[Any] | None = None) -> None:
        """Let every part of the dataloader that has `set_epoch` have the number of the current epoch.

        `open` does so if this was not called before. A loop calls it before its EPOCH_START, so that listeners that
        set another number have the last word; a resumption puts that back.

        Args:
            state: The training state.
            dataloader: What is to be read; the state's train dataloader when `None`.
        """
        loader = state.train_dataloader if dataloader is None else dataloader
        epoch, num_read = int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch)
        self.restore_between_epochs(state)
        held, start = self.watch(loader), (self._start if self._is_resumed else None) or {}
        returns = bool(start) and (_has_place(loader) or self.spin or num_read == 0)
        saved = start.get(_HELD, {}) if returns else {}
        if returns and not _has_place(loader):
            self._warm_up(loader, epoch, start.get(SEED_KEY, state.rank_zero_seed))
            self._warn_of(loader, epoch, held.missing(saved) if num_read > 0 else ())
        # Numbers of inside the epoch may be those that a listener has set in place of the epoch's.
        if num_read == 0:
            held.restore(saved)
        parts = set_epoch_everywhere(loader, epoch)
        if num_read > 0:
            held.restore(saved)
        is_known = can_be_seeded(loader) or reads_in_workers(loader)
        if epoch > 0 and isinstance(loader, DataLoader) and loader.persistent_workers and not is_known:
            held.warn_of_copies()
        self._begun = loader, epoch, parts
        self._settings = held.settings()

    def open(self, state: "State", dataloader: Iterable[Any] | None = None) -> Iterator[Any]:
        """Return the rest of the current epoch, whose number and first batch the state's timestamp says.

        Args:
            state: The training state.
            dataloader: What to read; the state's train dataloader when `None`.
        """
        loader = state.train_dataloader if dataloader is None else dataloader
        epoch, num_read = int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch)
        if self._begun is None or self._begun[0] is not loader or self._begun[1] != epoch:
            self.begin(state, loader)
        (_, _, parts), self._begun = cast("tuple[Any, int, list[object]]", self._begun), None
        self.watch(loader).note_listeners(self._settings)
        set_epoch_everywhere(loader, epoch, parts)  # those that a listener has put there meanwhile
        rng, self._rng = self._rng, None
        is_resumed, self._is_resumed = self._is_resumed, False
        if not is_resumed:
            self._at_save = {}
        knows_place = self._hand_over(loader) or bool(state.dataset_resumption.get("train"))
        is_spun = self.spin and not knows_place
        if is_resumed and is_spun and num_read > 0 and self._start is None:
            # Composer's checkpoints do not say; without dropout and augmentation, this draws what training has drawn.
            for earlier in range(epoch):
                set_epoch_everywhere(loader, earlier)
                next(iter(loader), None)
            set_epoch_everywhere(loader, epoch)
        if num_read == 0 or not is_resumed:
            self._start = {SEED_KEY: state.rank_zero_seed, _HELD: self.watch(loader).capture()}
        batches = self._read(loader, epoch, num_read if knows_place else 0, num_read if is_spun else 0)
        if is_resumed and num_read > 0 and (knows_place or is_spun):
            if getattr(loader, "num_workers", None) == 0:  # so that this process has loaded what it has trained on
                self.watch(loader).restore(self._at_save, role="loads")
            if rng is not None:
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
        start = self._start or {}
        seed = start.get(SEED_KEY)
        if seed is not None and (can_be_seeded(loader) or reads_in_workers(loader)):
            replays, lead = num_left_out > 0 and self._must_replay(loader), None
            if num_left_out > 0 and not draws_nothing(loader.dataset, loader.collate_fn):
                # Where the first epoch is over, what stays after it was made by `_warm_up`.
                begins = epoch == 0 or (loader.num_workers > 0 and not loader.persistent_workers)
                lead = max(1, loader.num_workers) if begins else 0
            batches = self._seeded_of(loader)
            return batches.open(seed, epoch, num_left_out, lead, replays=replays, order=self._at_save.get(_ORDER))
        if seed is None:
            batches = iter(loader)
        elif _has_place(loader):
            batches = open_seeded(loader, derive_seed(seed, epoch, get_global_rank()), count(place))
        else:
            batches = open_streamed(loader, derive_seed(seed, epoch, get_global_rank()))
        for _ in range(num_left_out):
            next(batches, None)
        return batches

    def _seeded_of(self, loader: Any) -> SeededBatches:
        if self._seeded is None or self._seeded.loader is not loader:
            self._seeded = SeededBatches(loader, get_global_rank(), sets_epoch=True)
        return self._seeded

    def _must_replay(self, loader: Any) -> bool:
        """Return whether batches that were trained on must be loaded again, to draw what they have drawn.

        Of what this process loads, checkpoints say where its generators were.
        """
        if loader.num_workers > 0:
            return reads_in_workers(loader) or holds_state(loader.dataset, loader.collate_fn)
        return self.watch(loader).shares_generators()

    def _warm_up(self, loader: Any, epoch: int, seed: int) -> None:
        """Load the first batch of epoch 0, for what a dataset makes as it does, and put the samplers' numbers back.

        A process of before had done so, and workers that persist had, in each epoch. In epoch 0, `open` does it.
        """
        num_workers, batches = getattr(loader, "num_workers", 0), max(1, getattr(loader, "num_workers", 0))
        persists = num_workers > 0 and loader.persistent_workers
        is_map = can_be_seeded(loader)
        is_own = is_map and has_own_order(loader)  # which this process draws
        if (
            epoch == 0
            or isinstance(loader, Iterator | list | tuple)
            or (num_workers > 0 and not persists and not is_own)
        ):
            return
        if is_map and not is_own and draws_nothing(loader.dataset, loader.collate_fn):
            return
        held = self.watch(loader)
        before = held.numbers()
        for earlier in range(1 if is_map or not persists else epoch):
            set_epoch_everywhere(loader, earlier)
            if is_map or reads_in_workers(loader):
                first = self._seeded_of(loader).open(seed, earlier)
            else:
                first = open_streamed(loader, derive_seed(seed, earlier, get_global_rank()))
            for _ in islice(first, batches):
                pass
        held.set_numbers(before)

    def _warn_of(self, loader: Any, epoch: int, missing: Sequence[str]) -> None:
        """Warn of what neither a checkpoint nor reading again brings back."""
        told = [f"train_dataloader.{name}, which no longer exists" for name in missing]
        persists = epoch > 0 and isinstance(loader, DataLoader) and loader.persistent_workers
        if persists and holds_state(loader.dataset, loader.collate_fn):
            told.append(
                f"what train_dataloader.dataset, a {type(loader.dataset).__name__}, or collate_fn holds in worker "
                "processes that persist, and goes on from in each epoch"
            )
        if told:
            warnings.warn(
                f"The resumed run may read other samples than if it had not been stopped, since it cannot bring back "
                f"{' and '.join(told)}. Draw from the generators of the process (torch.rand, random.random), or from "
                "set_epoch(epoch) and the number of the sample; or give the dataloader, dataset or sampler "
                "state_dict() and load_state_dict(state), and load without workers that persist.",
                stacklevel=2,
            )

    def skip_to_end(self, dataloader: Iterable[Any]) -> None:
        """Leave an epoch that was resumed at its end, of which nothing is left to read, as if it had been read.

        What draws an epoch's order from a generator of its own begins to when the first batch is asked for.

        Args:
            dataloader: What the epoch was opened with.
        """
        self.watch(dataloader).restore(self._at_save)

    def forget(self) -> None:
        """Act as if no checkpoint had been loaded, for a run that begins again from zero."""
        self._rng = self._loader_state = self._start = self._begun = None
        self._is_resumed = False

    def close(self) -> None:
        """End the worker processes that persist between epochs. Epochs may be opened again, with new ones."""
        if self._seeded is not None:
            self._seeded.close()

    def state_dict(self, state: "State") -> dict[str, Any]:
        """Return what this rank needs to go on from here: what the batches of the open epoch depend on."""
        held, num_read = self.watch(state.train_dataloader).capture(), int(state.timestamp.batch_in_epoch)
        if num_read == 0:
            return {SEED_KEY: state.rank_zero_seed, _HELD: held}
        if self._seeded is not None and self._seeded.loader is state.train_dataloader:
            held[_ORDER] = self._seeded.order_of(num_read)
        return {**(self._start or {}), _AT_SAVE: held}

    def _hand_over(self, loader: Any) -> bool:
        """Let a dataloader with a state of its own take its place, and say whether it did."""
        loaded, self._loader_state = self._loader_state, None
        if loaded is None or not keeps_own_state(loader):
            return False
        loader.load_state_dict(loaded)
        return True


def keeps_own_state(dataloader: Any) -> bool:
    """Return whether a dataloader, such as torchdata's `StatefulDataLoader`, knows where it stands.

    One whose dataset knows it, such as mosaicml-streaming's, need not be asked: the dataset is. Torchdata's draws from
    generators once more as it goes to its place, so that where there are any it is read from the start of the epoch.
    """
    return _has_state(dataloader) and not dataset_counts_samples(dataloader) and not _draws_again(dataloader)


def _draws_again(loader: Any) -> bool:
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    if torchdata is None or not isinstance(loader, torchdata.StatefulDataLoader):
        return False
    # Its own samplers, and a dataset with a state, go to their place without that.
    own = [
        part for part in (loader.sampler, loader.batch_sampler) if not type(part).__module__.startswith("torchdata.")
    ]
    dataset = None if _has_state(loader.dataset) else loader.dataset
    return holds_generators(loader.generator, dataset, loader.collate_fn, *own)


def dataset_counts_samples(dataloader: Any) -> bool:
    """Return whether a dataloader's dataset, such as a `StreamingDataset`, finds its place by a number of samples."""
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
        start = rng[rank].get(EPOCH_START_KEY)
        if len(rng) != get_world_size() and start and _AT_SAVE in start:  # a share of another size
            start = {**start, _AT_SAVE: {name: value for name, value in start[_AT_SAVE].items() if name != _ORDER}}
        return None if start is None else dict(start)
    # The saved run did not have this rank. The seed and numbers such as of the epoch are those of all; generators are
    # not, lest two ranks draw the same.
    first = rng[0].get(EPOCH_START_KEY) or {}
    found = {SEED_KEY: first[SEED_KEY]} if SEED_KEY in first else {}
    shared = {kind: entries for kind, entries in first.get(_HELD, {}).items() if kind in ("numbers", "listened")}
    return {**found, _HELD: shared} if shared else found


def _has_place(dataloader: Any) -> bool:
    return keeps_own_state(dataloader) or dataset_counts_samples(dataloader)


def _has_state(holder: Any) -> bool:
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


def set_epoch(dataloader: Iterable[Any], epoch: int) -> None:
    """Set the epoch of an evaluation's or a prediction's DistributedSampler, and of nothing that training may share."""
    if isinstance(dataloader, DataLoader):
        for sampler in (dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None)):
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)
                return


TRAIN_DATA_KEY = "train_data"
"""In a checkpoint's `metadata`: how many samples the dataset has, and what its order was drawn from."""


def describe_train_data(state: "State") -> dict[str, int]:
    """Return the length of a map-style train dataset, and the seed of a sampler that has one of its own."""
    loader = state.train_dataloader
    if not isinstance(loader, DataLoader):
        return {}
    found: dict[str, int] = {}
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
        found["num_samples"] = len(dataset)
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            found["shuffle_seed"] = sampler.seed
    return found


def refuse_other_data(saved: Mapping[str, Any], state: "State", path: str) -> None:
    """Refuse a checkpoint of inside an epoch of other data, whose batches cannot be told apart any more.

    Every rank must call this, and rank 0 compares for all. Between two epochs, data may change.

    Args:
        saved: The checkpoint's `state`.
        state: The training state, not yet changed.
        path: The checkpoint, for the message.

    Raises:
        IncompatibleCheckpointError: On all ranks, if the dataset has another length or its order another seed.
    """
    ranks = Ranks()
    ranks.together(lambda: _compare(saved, state, path) if ranks.rank == 0 else None)


def begin_epoch_again(saved: dict[str, Any]) -> None:
    """Change what was saved inside an epoch so that the epoch begins again, with whatever data there is now."""
    saved.pop("dataset_state", None)
    timestamps = saved.get("timestamp") or {}
    timestamp = timestamps.get("Timestamp", timestamps)
    for name in timestamp:
        if name.endswith("_in_epoch"):
            timestamp[name] = 0
        elif name in ("epoch_wct", "batch_wct"):
            timestamp[name] = timedelta()


def _compare(saved: Mapping[str, Any], state: "State", path: str) -> None:
    metadata, timestamps = saved.get("metadata"), saved.get("timestamp")
    if not isinstance(metadata, Mapping) or not isinstance(timestamps, Mapping):
        return
    before, now = metadata.get(TRAIN_DATA_KEY), describe_train_data(state)
    timestamp = timestamps.get("Timestamp", timestamps)
    if not isinstance(before, Mapping) or not isinstance(timestamp, Mapping) or not timestamp.get("batch_in_epoch"):
        return
    differing = [name for name, value in now.items() if name in before and before[name] != value]
    if differing:
        told = " and ".join(f"{name}={shown(before[name])} (now {now[name]!r})" for name in differing)
        raise IncompatibleCheckpointError(
            f"{path} was saved inside epoch {shown(timestamp.get('epoch'))}, after "
            f"{shown(timestamp['batch_in_epoch'])} batches of a train dataset with {told}: which "
            f"samples are left in the epoch cannot be told. Train on the same data, "
            f"load a checkpoint from the end of an epoch, begin the epoch again with load_restart_epoch=True of the "
            f"Trainer or restart_epoch=True of load_checkpoint(), or go on after as many batches of the data of now "
            f"with load_ignore_keys=['state/metadata/{TRAIN_DATA_KEY}/*']."
        )
