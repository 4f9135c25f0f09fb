"""Batches of the training dataloader over epochs and calls of `fit`."""

import math
import warnings
from collections.abc import Iterator
from numbers import Real
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from composer.trainer import _error_context as error_context
from composer.trainer._arguments import user_stacklevel
from composer.trainer._rank_sync import Ranks, next_batch
from composer.trainer._step import split, transform
from composer_dist import get_global_rank, get_local_rank, get_world_size
from composer_dist.stale_memory import tidy_shared_memory
from composer_events.data_position import BatchSizes, DataPosition, dataset_counts_samples, keeps_own_state
from composer_events.data_spec import DataSpec
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.state import State
from composer_time import Time, TimeUnit

_NO_BATCH: Any = object()


class TrainBatches:
    """Iterator over the rest of the current epoch.

    If a `fit` ends in the middle of an epoch, the iterator stays open, and the next `fit` continues with the next
    batch. If the dataloaders of the ranks differ in length, the epoch ends on all ranks with the shortest.

    Attributes:
        data_spec: Prepares and counts the batches.
        num_samples: The number of samples of the latest batch on this rank.
        num_tokens: The number of tokens of the latest batch on this rank, 0 if it has none.
    """

    def __init__(self, data_spec: DataSpec, state: State, engine: Engine, ranks: Ranks, position: DataPosition) -> None:
        self.num_samples: int | float = 0
        self.num_tokens = 0
        self.data_spec = data_spec
        self._state = state
        self._engine = engine
        self._ranks = ranks
        self._position = position
        position.watch(data_spec.dataloader)
        self._open: Iterator[Any] | None = None  # the epoch being read
        self._num_read = 0  # batches taken from it
        self._is_untouched = True  # nothing was read since the epoch was opened
        self._latest: Any = None
        # With a schedule of the batch size, which divides the batches of the dataloader:
        self._limit: Time[int] | None = None  # batches of the dataloader in an epoch
        self._num_whole = self._offset = self._skip = 0  # how many were read, and how many samples of the latest
        self._whole: Any = None
        self._num_in_whole = 0
        self._exhausted = False
        self._is_warned = False  # one warning for a rank with fewer batches is enough

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch, each after its BEFORE_DATALOADER event."""
        run_event = self._engine.run_event
        if self._open is None:
            self._open = self._open_epoch()
        self._exhausted = False
        while True:
            run_event(Event.BEFORE_DATALOADER)
            # If an exception prevented the step on the latest batch, that batch is yielded again.
            is_new = self._num_read == self._state.timestamp.num_batches_in_epoch
            if is_new and not self._ranks.all_have_a_batch(has_one := self._read()):
                if has_one and not self._is_warned:
                    self._is_warned = True
                    warnings.warn(
                        f"Another rank had no batch left after {self._num_read}, so epoch "
                        f"{self._state.timestamp.num_epochs} ends there on all ranks; what global rank "
                        f"{get_global_rank()} still had is not trained on. A sampler of dist.get_sampler(dataset) "
                        "gives all ranks as many.",
                        stacklevel=user_stacklevel(),
                    )
                # Without a batch, AFTER_DATALOADER does not run; only the profiler's span must end.
                self._engine.run_marker_only_event(Event.AFTER_DATALOADER)
                break
            self._num_read += is_new
            self._count(self._latest)
            yield self._latest
        if self._num_read == 0:
            self._raise_empty_dataloader()
        self._exhausted = True

    def divide(self) -> None:
        """Divide the batches of the dataloader into those that a schedule of the batch size asks for."""
        state, loader = self._state, cast("object", self.data_spec.dataloader)
        size, reason = getattr(loader, "batch_size", None), None
        if state.deepspeed_enabled:
            reason = "deepspeed_config, which fixes the batch size. Train with DDP or FSDP"
        elif not isinstance(loader, DataLoader) or not isinstance(size, int) or keeps_own_state(loader):
            kind = type(self.data_spec.dataloader).__name__
            reason = f"train_dataloader={kind}. Give a torch DataLoader with a batch_size"
        elif dataset_counts_samples(loader):
            reason = "a dataset with state_dict(num_samples, from_beginning). Give one without"
        elif self._open is not None and self._position.sizes is None:
            reason = "an epoch that has begun without it. Call fit with it at the end of an epoch"
        if reason is not None:
            raise ValueError(f"schedulers has a schedule of 'batch_size', which cannot be combined with {reason}.")
        if self._position.sizes is None:
            self._position.sizes = BatchSizes(cast("int", size), self._ranks.world_size)
        if state.dataloader_len is not None:  # epochs have an unknown number of batches from here on
            self._limit = state.dataloader_len
            restore_dataloader(state, state.dataloader, state.dataloader_label, None)

    def resume(self) -> None:
        """Restore the random state of the checkpoint, if it was written between two epochs.

        Within an epoch it belongs to the next batch, and is restored when the epoch is opened.
        """
        # Workers of a killed run leave shared memory behind. One process per machine removes it.
        if dataset_counts_samples(self.data_spec.dataloader) and get_local_rank() == 0:
            tidy_shared_memory()
        self._position.restore_between_epochs(self._state)

    @error_context.stage("the dataloader")
    def begin_epoch(self) -> None:
        """Set the epoch of the data, before EPOCH_START, on which callbacks may set another one."""
        self._position.begin(self._state, self.data_spec.dataloader)

    def restart(self) -> None:
        """Drop the open epoch, because the timestamp was set back."""
        self._open = None

    def epoch_is_complete(self) -> bool:
        """Return whether every batch of the epoch has been trained on; close the epoch if so."""
        length, num_read = self._state.dataloader_len, self._state.timestamp.num_batches_in_epoch
        if self._position.sizes is not None:
            length, num_read = self._limit, self._num_whole - (self._offset < self._num_in_whole)
        complete = self._exhausted or (length is not None and num_read >= length.value)
        if complete:
            self._open = None
        return complete

    def iteration_is_complete(self) -> bool:
        """Return whether the iteration is complete; without an `iteration_length` it never is."""
        length = self._state.iteration_length
        if length is None:
            return False
        stamp = self._state.timestamp
        passed = stamp.epoch_in_iteration if length.unit == TimeUnit.EPOCH else stamp.token_in_iteration
        return passed >= length

    @error_context.stage("the dataloader")
    def _read(self) -> bool:
        """Read the next batch, and return whether there was one."""
        sizes = self._position.sizes
        if sizes is None:
            batch = self._read_whole(self._num_read, self._state.dataloader_len)
        else:
            batch = self._read_part(sizes)
        if batch is _NO_BATCH:
            return False
        self._latest = batch
        return True

    def _read_whole(self, num_read: int, length: Time[int] | None) -> Any:
        """Return the next batch of the dataloader."""
        assert self._open is not None
        if length is not None and num_read >= length.value:
            self._show_end()
            return _NO_BATCH
        batch = next_batch(self._open, self.data_spec.dataloader, num_read, _NO_BATCH)
        if batch is _NO_BATCH:
            return _NO_BATCH
        self._is_untouched = False
        return transform("batch_transforms", self.data_spec, batch)

    def _read_part(self, sizes: BatchSizes) -> Any:
        """Return the next part of a batch of the dataloader, as large as the schedule of the batch size has it."""
        spec = self.data_spec
        while self._offset >= self._num_in_whole:
            whole = self._read_whole(self._num_whole, self._limit)
            if whole is _NO_BATCH:
                return _NO_BATCH
            self._whole, self._num_in_whole = whole, int(spec.get_num_samples_in_batch(whole))
            if self._num_in_whole > sizes.of_rank:
                raise ValueError(
                    f"get_num_samples_in_batch returned {self._num_in_whole} for a batch of batch_size={sizes.of_rank} "
                    "samples. A schedule of 'batch_size' needs the number of samples."
                )
            self._num_whole += 1
            self._offset, self._skip = self._skip, 0
        size = sizes.next_size(self._offset)
        part = self._whole if size >= self._num_in_whole else split(spec, self._whole, size)[self._offset // size]
        self._offset += size
        return part

    def _raise_empty_dataloader(self) -> None:
        """Warn about an epoch without batches; raise if training would never end, or earlier epochs had batches."""
        state = self._state
        message = (
            f"No batches were trained for global rank {get_global_rank()}: "
            f"train_dataloader={self.data_spec.dataloader!r} yielded no batch in epoch {state.timestamp.num_epochs}. "
            "Give it at least one batch; a DataLoader with drop_last=True needs a dataset of batch_size examples or "
            "more, and an iterator can be read only once."
        )
        duration = state.max_duration
        # Only a duration in epochs is reached without batches.
        if state.timestamp.num_batches > 0 or duration is None or duration.unit is not TimeUnit.EPOCH:
            raise ValueError(message)
        warnings.warn(message, stacklevel=user_stacklevel())

    def _show_end(self) -> None:
        """Advance stateful or seeded data to the end of the epoch, where the next one starts."""
        assert self._open is not None
        loader = self.data_spec.dataloader
        if keeps_own_state(loader) or (self._is_untouched and dataset_counts_samples(loader)):
            # Such a loader draws the next epoch's order only when it is exhausted.
            next(self._open, None)
        elif self._is_untouched:
            self._position.skip_to_end(loader)

    def _count(self, batch: Any) -> None:
        self.num_samples = self.data_spec.get_num_samples_in_batch(batch)
        self.num_tokens = self.data_spec.get_num_tokens_in_batch(batch)
        duration = self._state.max_duration
        if type(self.num_samples) is not int or self.num_samples <= 0:
            _check_samples(self.num_samples, duration)
        if self.num_tokens == 0 and duration is not None and duration.unit is TimeUnit.TOKEN:
            raise ValueError(
                f"max_duration={duration.to_timestring()!r} counts tokens, and a batch of train_dataloader has none. "
                "Give DataSpec(dataloader, get_num_tokens_in_batch=...), or a duration in batches ('500ba')."
            )

    @error_context.stage("the dataloader")
    def _open_epoch(self) -> Iterator[Any]:
        self._num_read, self._is_untouched = self._state.timestamp.num_batches_in_epoch, True
        self._num_whole, self._skip = self._position.place(self._state)
        self._offset = self._num_in_whole = 0
        return self._position.open(self._state, self.data_spec.dataloader)


def _check_samples(num_samples: Any, duration: Time[Any] | None) -> None:
    """Reject a sample count that is not a number, or with which training would never end."""
    returned = f"get_num_samples_in_batch returned {num_samples!r} for a batch of train_dataloader."
    if isinstance(num_samples, bool) or not (isinstance(num_samples, Real) or hasattr(num_samples, "item")):
        raise TypeError(f"{returned} It must return a number of samples.")
    if not 0 <= float(num_samples) < math.inf:
        raise ValueError(f"{returned} It must return a number, 0 or more.")
    # With several ranks, the others may have samples.
    if num_samples == 0 and get_world_size() == 1 and duration is not None and duration.unit is TimeUnit.SAMPLE:
        raise ValueError(
            f"{returned} max_duration={duration.to_timestring()!r} counts samples, and would never be reached. Count "
            "them, or give a duration in batches ('500ba')."
        )


def restore_dataloader(state: State, dataloader: Any, label: str | None, length: Time[int] | None) -> None:
    """Set a state's dataloader, label and length, which may be unknown although the dataloader has one."""
    state.set_dataloader(dataloader, label)
    state._dataloader_len = length  # pyright: ignore[reportPrivateUsage]  # `dataloader_len` accepts no `None`


def with_batch_size(loader: Any, batch_size: int) -> "DataLoader[Any] | None":
    """Return a DataLoader like another one, with a batch size of its own; `None` if it cannot be made."""
    # A subclass may have arguments that are not known here, and an iterable dataset may know the batch size.
    if (
        type(cast("object", loader)) is not DataLoader
        or type(loader.batch_sampler) is not BatchSampler
        or isinstance(loader.dataset, IterableDataset)
    ):
        return None
    names = (
        "sampler num_workers collate_fn pin_memory drop_last timeout worker_init_fn multiprocessing_context generator "
        "prefetch_factor persistent_workers in_order"
    )
    return DataLoader(loader.dataset, batch_size, **{name: getattr(loader, name) for name in names.split()})
