# pyright: basic
"""Position of a run in its data, so that a resumed run reads the same batches."""

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, cast

try:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler
except ImportError as error:
    raise ImportError("the data position needs torch. Run `pip install 'composer-events[torch]'`.") from error

from composer_events._held_state import HeldState, holds_generators, holds_state, set_epoch_everywhere
from composer_events.arguments import loaded
from composer_events.parallelism import get_global_rank, get_world_size
from composer_events.seeded_batches import (
    SeededBatches,
    can_be_seeded,
    derive_seed,
    has_own_order,
    open_seeded,
    open_streamed,
    reads_in_workers,
    uses_no_rng,
)

if TYPE_CHECKING:
    from composer_events import State

__all__ = [
    "EPOCH_START_KEY",
    "LOADER_KEY",
    "SEED_KEY",
    "BatchSizes",
    "DataPosition",
    "begin_next_epoch",
    "dataset_counts_samples",
    "keeps_own_state",
    "leave_epoch",
    "set_epoch",
]

EPOCH_START_KEY = "epoch_start"
"""In each entry of a checkpoint's `rng`: the state at the start of the epoch that its batches depend on."""

LOADER_KEY = "train_dataloader"
"""In a checkpoint's `dataset_state`: the state of each rank's dataloader, if it has one."""

SEED_KEY = "seed"
"""Under `EPOCH_START_KEY`: the seed of the epoch's batches."""

# In each entry under `EPOCH_START_KEY`: the state of the dataloader's parts at the start of the epoch and at the save.
_HELD, _AT_SAVE = "held", "held_at_save"
_ORDER = "order"  # below `_AT_SAVE`: a hash of the epoch's order so far
_SHARE = "share"  # the number of the rank's share of the data, if ranks have the same one
_DIVIDED = "divided"  # the size of the dataloader's batches over all ranks, if the clock counts parts of them


class BatchSizes:
    """Division of a dataloader's batches into those of the training clock.

    Args:
        of_rank: The samples of a batch of the dataloader.
        num_ranks: The number of ranks with batches of their own.

    Attributes:
        of_rank: The samples of a batch of the dataloader.
        whole: The same over all ranks.
    """

    def __init__(self, of_rank: int, num_ranks: int) -> None:
        self.of_rank, self.whole = of_rank, of_rank * num_ranks
        self._size = of_rank
        self._num_ranks = num_ranks
        self._divisors = [size for size in range(of_rank, 0, -1) if of_rank % size == 0]

    @property
    def batch_size(self) -> int:
        """Samples of the next batches over all ranks. Assignments are rounded down to a divisor of whole batches."""
        return self._size * self._num_ranks

    @batch_size.setter
    def batch_size(self, batch_size: float) -> None:
        largest = batch_size / self._num_ranks / (1 - 1e-9)  # a product may be too small by rounding
        if not 0 <= largest <= self.of_rank * 1.00001:
            raise ValueError(
                f"The schedule of 'batch_size' asks for {batch_size:g} samples, and the batches of train_dataloader "
                f"have {self.whole} over all ranks. Give the dataloader the largest batch size of the schedule."
            )
        self._size = next((size for size in self._divisors if size <= largest), 1)

    def place(self, num_samples: int) -> tuple[int, int]:
        """Return how many whole batches are before a sample of the epoch, and this rank's samples after these."""
        num_whole, rest = divmod(num_samples, self.whole)
        return num_whole, rest // self._num_ranks

    def next_size(self, offset: int) -> int:
        """Return this rank's samples in the batch that begins at an offset in a whole batch; a divisor of the offset.

        It depends on nothing else, so that a resumed run divides the rest of a whole batch in the same way.
        """
        return next(size for size in self._divisors if size <= self._size and offset % size == 0)


class DataPosition:
    """Iterate over epochs, and continue an interrupted epoch at its next batch after a resume.

    The order and augmentation of a DataLoader's batches over a map-style dataset are derived from the run's seed, the
    epoch, the rank and the batch number, so that batches before the position need not be loaded; see `SeededBatches`.
    Dataloaders and datasets with `state_dict` and `load_state_dict` restore their position themselves; their random
    numbers in this process are drawn from the same seed. Any other dataloader is read from the start of the epoch, with
    random numbers of its own, and the batches before the position are dropped.

    Generators and states of samplers, datasets and dataloaders, and the counters of samplers, are kept for each rank,
    as of the start of the epoch and of the save; see `HeldState`. A single warning names everything that cannot be
    restored.

    A custom training loop attaches a position to its state before loading, so that `CheckpointSaver` and
    `load_checkpoint` find it, and begins each epoch with `open`.

    Args:
        spin: Whether to skip batches that were trained on. If not, and if the dataloader cannot restore its position,
            the rest of the epoch has other batches.

    Attributes:
        sizes: Set if the clock counts parts of the dataloader's batches, for a schedule of the batch size.
        share: The number of this rank's share of the data, and of all shares, if ranks that split tensors have the same
            one; `None` if each rank has its own.
        change_batch_size: Set by a loop, while it loads a checkpoint, to a function that changes the batch size of this
            rank and returns whether it can.

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

    _load_rng_state: Callable[..., None]  # set together with `_rng`

    def __init__(self, spin: bool = True) -> None:
        self.spin = spin
        self.sizes: BatchSizes | None = None
        self.share: tuple[int, int] | None = None
        self.change_batch_size: Callable[[int], bool] | None = None
        self._start: dict[str, Any] | None = None  # of the open epoch
        self._rng: Sequence[Mapping[str, Any]] | None = None  # loaded and not yet restored
        self._at_save: Mapping[str, Any] = {}  # the loaded state of the dataloader's parts at the save
        self._loader_state: Any = None
        self._is_resumed = False
        self._held: HeldState | None = None
        # The epoch for which `begin` was called, and the parts that have its number.
        self._begun: tuple[Any, int, list[object]] | None = None
        # Settings of the dataset before listeners changed them at the start of the epoch.
        self._settings: dict[str, Any] = {}
        self._seeded: SeededBatches | None = None  # reused, since its workers may persist

    @classmethod
    def attach(cls, state: "State", spin: bool = True) -> "DataPosition":
        """Create a position and attach it to a state."""
        position = state.data_position = cls(spin)
        if state.train_dataloader is not None:
            position.watch(state.train_dataloader)
        return position

    @staticmethod
    def of(state: "State") -> "DataPosition | None":
        """Return the position that is attached to a state, or `None`."""
        return getattr(state, "data_position", None)  # any object may be a state

    def resume(
        self,
        rng: Sequence[Mapping[str, Any]] | None,
        state: "State",
        load_rng_state: Callable[..., None],
    ) -> None:
        """Store a loaded position, to restore it when the next epoch is opened.

        Args:
            rng: The result of `load_checkpoint`.
            state: The loaded state.
            load_rng_state: Restores this rank's generators from `rng`, as `composer_dist.load_rng_state` does.
        """
        # One entry for each share of the data.
        firsts = _first_ranks(rng or [{}])
        rng = [rng[first] for first in firsts] if rng else None
        self._rng, self._is_resumed, self._begun = rng, True, None
        self._load_rng_state = load_rng_state
        self._start = _epoch_start(rng or [{}], self.rank, self.num_shares)
        # Removed, since the next checkpoint inside this epoch saves the rest again, with a newer entry of this name.
        self._at_save = (self._start or {}).pop(_AT_SAVE, {})
        waiting = (state.dataset_state or {}).get(LOADER_KEY) or []
        # With another number of ranks, the saved states do not describe this rank's share.
        waiting = [waiting[first] for first in firsts if first < len(waiting)]
        self._loader_state = waiting[self.rank] if len(waiting) == self.num_shares else None

    @property
    def rank(self) -> int:
        """The number of this rank's share of the data."""
        return get_global_rank() if self.share is None else self.share[0]

    @property
    def num_shares(self) -> int:
        """The number of shares of the data."""
        return get_world_size() if self.share is None else self.share[1]

    def watch(self, loader: Any) -> HeldState:
        """Record the initial state of a dataloader: checkpoints keep what has changed since."""
        if self._held is None or self._held.loader is not loader:
            self._held = HeldState(loader, only_generators=_has_place(loader))
        return self._held

    def place(self, state: "State") -> tuple[int, int]:
        """Return how many batches of the dataloader the epoch has used, and this rank's samples used of the next."""
        stamp = state.timestamp
        return (int(stamp.batch_in_epoch), 0) if self.sizes is None else self.sizes.place(int(stamp.sample_in_epoch))

    def restore_between_epochs(self, state: "State") -> None:
        """Restore the random number generators if a checkpoint from between two epochs was loaded."""
        if self._rng is not None and state.timestamp.batch_in_epoch == 0:
            self._load_rng_state(self._rng, *(self.share or ()))
            self._rng = None

    def begin(self, state: "State", dataloader: Iterable[Any] | None = None) -> None:
        """Call `set_epoch` on every part of the dataloader that has it.

        `open` does this if it was not done before. A loop calls it before its EPOCH_START, so that a listener can set
        another number, which a resume restores.

        Args:
            state: The training state.
            dataloader: The dataloader to read; the state's train dataloader when `None`.
        """
        loader, epoch, num_read = _place_in(state, dataloader)
        self.restore_between_epochs(state)
        held, saved = self.watch(loader), self._return_to_start(state, loader, epoch, num_read)
        # Inside an epoch the saved numbers are restored last: a listener may have set them after `set_epoch`.
        if num_read == 0:
            held.restore(saved)
        parts = set_epoch_everywhere(loader, epoch)
        if num_read > 0:
            held.restore(saved)
        if _persists(loader, epoch) and not can_be_seeded(loader) and not reads_in_workers(loader):
            held.warn_of_copies()
        self._begun = loader, epoch, parts
        self._settings = held.settings()

    def _return_to_start(self, state: "State", loader: Any, epoch: int, num_read: int) -> Mapping[str, Any]:
        """Repeat what the interrupted run read before the epoch, and return the saved state of the loader's parts."""
        start = (self._start if self._is_resumed else None) or {}
        if num_read > 0 and start.pop(_DIVIDED, None) is not None and self.sizes is None:
            raise ValueError(
                "The checkpoint was saved inside an epoch by a run with Schedule('batch_size', ...), and its place in "
                "the data counts samples. Give schedulers such a schedule, or resume from the end of an epoch."
            )
        if not start or not (_has_place(loader) or self.spin or num_read == 0):
            return {}
        saved: Mapping[str, Any] = start.get(_HELD, {})
        if not _has_place(loader):
            self._warm_up(loader, epoch, start.get(SEED_KEY, state.rank_zero_seed))
            self._warn_of(loader, epoch, self.watch(loader).missing(saved) if num_read > 0 else ())
        return saved

    def open(self, state: "State", dataloader: Iterable[Any] | None = None) -> Iterator[Any]:
        """Return the rest of the current epoch, from the batch that the state's timestamp names.

        Args:
            state: The training state.
            dataloader: The dataloader to read; the state's train dataloader when `None`.
        """
        loader, epoch, num_read = _place_in(state, dataloader)
        self._finish_beginning(state, loader, epoch)
        rng, self._rng = self._rng, None
        is_resumed, self._is_resumed = self._is_resumed, False
        if not is_resumed:
            self._at_save = {}
        knows_place = self._hand_over(loader) or bool(state.dataset_resumption.get("train"))
        is_spun = self.spin and not knows_place
        num_whole, offset = self.place(state)
        is_inside = is_resumed and num_read > 0
        if not is_inside:
            self._start = {SEED_KEY: state.rank_zero_seed, _HELD: self.watch(loader).capture()}
        elif is_spun and self._start is None:
            # Composer's checkpoints have no position; without dropout and augmentation, this draws the numbers that
            # training drew.
            _read_earlier_epochs(loader, epoch)
        # The rest of a batch that was divided is read again, and with it what its reading draws from.
        replays = offset > 0 and holds_state(loader.dataset, loader.collate_fn)
        batches = self._read(loader, epoch, num_read if knows_place else 0, num_whole if is_spun else 0, replays)
        if is_inside:
            if offset > 0:
                batches = chain(list(islice(batches, 1)), batches)
            if knows_place or is_spun:
                self._restore_process(loader, rng)
        return batches

    def _finish_beginning(self, state: "State", loader: Any, epoch: int) -> None:
        """Begin the epoch if that was not done, and record what listeners have changed since."""
        if self._begun is None or self._begun[0] is not loader or self._begun[1] != epoch:
            self.begin(state, loader)
        (_, _, parts), self._begun = cast("tuple[Any, int, list[object]]", self._begun), None
        self.watch(loader).note_listeners(self._settings)
        set_epoch_everywhere(loader, epoch, parts)  # for parts that a listener has added meanwhile

    def _restore_process(self, loader: Any, rng: Sequence[Mapping[str, Any]] | None) -> None:
        """Restore the state of this process at the save, after the reads that lead to the position."""
        # Without workers, the dataset in this process has changed with the batches that were loaded before the save.
        if getattr(loader, "num_workers", None) == 0:
            self.watch(loader).restore(self._at_save, role="loads")
        # Last, since the reads have drawn random numbers.
        if rng is not None:
            self._load_rng_state(rng, *(self.share or ()))

    def _read(self, loader: Any, epoch: int, place: int, num_left_out: int, replays: bool = False) -> Iterator[Any]:
        """Return the batches of an epoch from a position, without loading earlier ones where that is equivalent.

        Args:
            loader: The dataloader.
            epoch: The number of the epoch.
            place: The number of the next batch of a loader that restores its own position.
            num_left_out: The number of batches to skip from there.
            replays: Whether to load these for certain, because loading changes generators that are used later.
        """
        start = self._start or {}
        seed = start.get(SEED_KEY)
        if seed is not None and (can_be_seeded(loader) or reads_in_workers(loader)):
            replays, lead = num_left_out > 0 and (replays or self._must_replay(loader)), None
            if num_left_out > 0 and not uses_no_rng(loader.dataset, loader.collate_fn):
                # After the first epoch, `_warm_up` has already made what a dataset creates on its first access.
                begins = epoch == 0 or (loader.num_workers > 0 and not loader.persistent_workers)
                lead = max(1, loader.num_workers) if begins else 0
            batches = self._seeded_of(loader)
            return batches.open(seed, epoch, num_left_out, lead, replays=replays, order=self._at_save.get(_ORDER))
        if seed is None:
            batches = iter(loader)
        elif _has_place(loader):
            batches = open_seeded(loader, derive_seed(seed, epoch, self.rank), count(place))
        else:
            batches = open_streamed(loader, derive_seed(seed, epoch, self.rank))
        for _ in range(num_left_out):
            next(batches, None)
        return batches

    def _seeded_of(self, loader: Any) -> SeededBatches:
        if self._seeded is None or self._seeded.loader is not loader:
            self._seeded = SeededBatches(loader, self.rank, sets_epoch=True)
        return self._seeded

    def _must_replay(self, loader: Any) -> bool:
        """Return whether skipped batches must be loaded again, since loading changes generators that are used later.

        For loading in this process, checkpoints hold the states of the generators.
        """
        if loader.num_workers > 0:
            return reads_in_workers(loader) or holds_state(loader.dataset, loader.collate_fn)
        return self.watch(loader).shares_generators()

    def _warm_up(self, loader: Any, epoch: int, seed: int) -> None:
        """Load the first batch of epoch 0, since datasets may create state on their first access.

        The interrupted process created that state in epoch 0, and persistent workers have read every epoch since. The
        numbers of samplers are left unchanged. Nothing is needed in epoch 0, whose first batch `open` loads.
        """
        num_workers, is_map = getattr(loader, "num_workers", 0), can_be_seeded(loader)
        is_own = is_map and has_own_order(loader)  # with an order that is drawn in this process
        starts_again = num_workers > 0 and not _persists(loader, epoch)
        draws_nothing = is_map and not is_own and uses_no_rng(loader.dataset, loader.collate_fn)
        if epoch == 0 or isinstance(loader, Iterator | list | tuple) or (starts_again and not is_own) or draws_nothing:
            return
        held = self.watch(loader)
        before = held.numbers()
        for earlier in range(epoch if _persists(loader, epoch) and not is_map else 1):
            set_epoch_everywhere(loader, earlier)
            if is_map or reads_in_workers(loader):
                first = self._seeded_of(loader).open(seed, earlier)
            else:
                first = open_streamed(loader, derive_seed(seed, earlier, self.rank))
            deque(islice(first, max(1, num_workers)), maxlen=0)
        held.set_numbers(before)

    def _warn_of(self, loader: Any, epoch: int, missing: Sequence[str]) -> None:
        """Warn of state that neither a checkpoint nor a repeated read restores."""
        told = [f"train_dataloader.{name}, which no longer exists" for name in missing]
        if _persists(loader, epoch) and holds_state(loader.dataset, loader.collate_fn):
            told.append(
                f"the state of train_dataloader.dataset, a {type(loader.dataset).__name__}, or collate_fn in worker "
                "processes that persist between epochs"
            )
        if told:
            warnings.warn(
                f"The resumed run may read other samples than an uninterrupted one, since it cannot restore "
                f"{' and '.join(told)}. Draw from the generators of the process (torch.rand, random.random), or from "
                "set_epoch(epoch) and the number of the sample; or give the dataloader, dataset or sampler "
                "state_dict() and load_state_dict(state), and do not use persistent workers.",
                stacklevel=2,
            )

    def skip_to_end(self, dataloader: Iterable[Any]) -> None:
        """Finish an epoch that was resumed at its end as if it had been read.

        Samplers with a generator of their own draw from it when the first batch is requested, which does not happen
        here.

        Args:
            dataloader: The dataloader with which the epoch was opened.
        """
        self.watch(dataloader).restore(self._at_save)

    def forget(self) -> None:
        """Discard the loaded position, for a run that starts over from zero."""
        self._rng = self._loader_state = self._start = self._begun = None
        self._is_resumed = False

    def close(self) -> None:
        """Stop worker processes that persist between epochs. Later epochs start new ones."""
        if self._seeded is not None:
            self._seeded.close()

    def state_dict(
        self, state: "State", check: Callable[[Any, str], None] = lambda state, name: None
    ) -> dict[str, Any]:
        """Return the state that this rank needs to resume here: everything that determines the epoch's batches.

        Args:
            state: The training state.
            check: Called with the state of each stateful part of the dataloader and its name. Raises if a checkpoint
                cannot hold it, which leaves it out with a warning.
        """
        watched = self.watch(state.train_dataloader)
        held = watched.savable(watched.capture(), check)
        share = {} if self.share is None else {_SHARE: self.rank}
        if int(state.timestamp.batch_in_epoch) == 0:
            return {SEED_KEY: state.rank_zero_seed, _HELD: held, **share}
        # A hash of the order, so that a resume can detect a sampler that no longer gives the same one.
        if self._seeded is not None and self._seeded.loader is state.train_dataloader:
            held[_ORDER] = self._seeded.order_of(self.place(state)[0])
        start = dict(self._start or {})
        if self.sizes is not None:
            start[_DIVIDED] = self.sizes.whole
        if _HELD in start:
            start[_HELD] = watched.savable(start[_HELD], check)
        return {**start, _AT_SAVE: held, **share}

    def _hand_over(self, loader: Any) -> bool:
        """Load the state of a dataloader that restores its own position, and return whether there was one."""
        loaded, self._loader_state = self._loader_state, None
        if loaded is None or not keeps_own_state(loader):
            return False
        loader.load_state_dict(loaded)
        return True


def _place_in(state: "State", dataloader: Iterable[Any] | None) -> tuple[Any, int, int]:
    """Return the dataloader to read, the epoch, and the number of batches that were read in it."""
    loader = state.train_dataloader if dataloader is None else dataloader
    return loader, int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch)


def _read_earlier_epochs(loader: Any, epoch: int) -> None:
    for earlier in range(epoch):
        set_epoch_everywhere(loader, earlier)
        # One batch suffices: samplers usually draw the order of an epoch, and workers get their seed, before it.
        next(iter(loader), None)
    set_epoch_everywhere(loader, epoch)


def _persists(loader: Any, epoch: int) -> bool:
    """Return whether worker processes of an earlier epoch read this one."""
    return epoch > 0 and isinstance(loader, DataLoader) and loader.persistent_workers


def keeps_own_state(dataloader: Any) -> bool:
    """Return whether a dataloader, such as torchdata's `StatefulDataLoader`, restores its own position.

    False if its dataset does so, such as mosaicml-streaming's, which is then used instead. Torchdata's draws from
    generators again on its way to the position, so if there are any it is read from the start of the epoch.
    """
    return _has_state(dataloader) and not dataset_counts_samples(dataloader) and not _draws_again(dataloader)


def _draws_again(loader: Any) -> bool:
    torchdata = loaded("torchdata.stateful_dataloader")
    if torchdata is None or not isinstance(loader, torchdata.StatefulDataLoader):
        return False
    # Torchdata's own samplers, and datasets with a state, restore their position without drawing again.
    own = [
        part for part in (loader.sampler, loader.batch_sampler) if not type(part).__module__.startswith("torchdata.")
    ]
    dataset = None if _has_state(loader.dataset) else loader.dataset
    return holds_generators(loader.generator, dataset, loader.collate_fn, *own)


def dataset_counts_samples(dataloader: Any) -> bool:
    """Return whether a dataset, such as a `StreamingDataset`, restores its position from a number of samples."""
    dataset: Any = getattr(dataloader, "dataset", None)
    if not _has_state(dataset):
        return False
    try:
        # As in StreamingDataset.state_dict(num_samples, from_beginning).
        inspect.signature(dataset.state_dict).bind(0, True)
    except TypeError:  # takes no arguments: used by a StatefulDataLoader
        return False
    return True


def begin_next_epoch(dataset_state: Any, state: "State") -> Any:
    """Return a StreamingDataset's state in the form to load.

    Such a dataset counts epochs when they begin, so between two epochs its state has the number of the finished one.
    """
    next_epoch = getattr(getattr(state.train_dataloader, "dataset", None), "next_epoch", None)
    if state.timestamp.batch_in_epoch > 0 or next_epoch is None or not isinstance(dataset_state, Mapping):
        return dataset_state
    is_over = dataset_state.get("epoch") == next_epoch - 1
    return {**dataset_state, "epoch": next_epoch} if is_over else dataset_state


def leave_epoch(state: "State", dataset_state: Any) -> None:
    """Move on to the next epoch, including a dataset that was positioned inside the current one.

    Args:
        state: The training state, into which a checkpoint from inside an epoch was loaded.
        dataset_state: The entry of that name in the checkpoint.
    """
    state.timestamp = state.timestamp.to_next_epoch()
    state.dataset_state = None
    if not dataset_counts_samples(state.train_dataloader):
        return
    dataset: Any = getattr(state.train_dataloader, "dataset", None)
    train = dataset_state.get("train") if isinstance(dataset_state, Mapping) else None
    start = dataset.state_dict(0, True)
    if isinstance(train, Mapping) and "epoch" in train:
        # Not taken from the dataset, whose count the ranks of a node share.
        start = {**start, "epoch": train["epoch"] + 1}
    dataset.load_state_dict(start)


def _first_ranks(rng: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the first of the ranks with each share of the data, in the order of the shares."""
    firsts: dict[int, int] = {}
    for rank, entry in enumerate(rng):
        firsts.setdefault(entry.get(EPOCH_START_KEY, {}).get(_SHARE, rank), rank)
    return [firsts[share] for share in sorted(firsts)]


def _epoch_start(rng: Sequence[Mapping[str, Any]], rank: int, num_shares: int) -> dict[str, Any] | None:
    """Return the saved state at the start of the epoch that this rank's batches depend on."""
    if rank < len(rng):
        start = rng[rank].get(EPOCH_START_KEY)
        if len(rng) != num_shares and start and _AT_SAVE in start:  # the order of another share does not apply
            start = {**start, _AT_SAVE: {name: value for name, value in start[_AT_SAVE].items() if name != _ORDER}}
        return None if start is None else dict(start)
    # The saved run did not have this rank. Its seed and epoch counters apply to all ranks; its generators do not, since
    # two ranks would draw the same numbers.
    first = rng[0].get(EPOCH_START_KEY) or {}
    found = {name: first[name] for name in (SEED_KEY, _DIVIDED) if name in first}
    shared = {kind: entries for kind, entries in first.get(_HELD, {}).items() if kind in ("numbers", "listened")}
    return {**found, _HELD: shared} if shared else found


def _has_place(dataloader: Any) -> bool:
    return keeps_own_state(dataloader) or dataset_counts_samples(dataloader)


def _has_state(holder: Any) -> bool:
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


def set_epoch(dataloader: Iterable[Any], epoch: int) -> None:
    """Set the epoch of a DistributedSampler for evaluation or prediction, not of parts shared with training."""
    if isinstance(dataloader, DataLoader):
        for sampler in (dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None)):
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)
                return
