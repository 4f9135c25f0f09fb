"""Description of a dataloader for a training loop."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from composer_events.arguments import check_counts, check_functions, loaded
from composer_events.batches import (
    count_samples,
    default_split_batch,
    length_or_none,
    split_batch_by_count,
    split_list,
)
from composer_events.parallelism import get_world_size

__all__ = ["DataSpec", "default_split_batch", "ensure_data_spec", "split_batch_by_count", "split_list"]

# The name in releases of Composer that split batches by a number of microbatches.
_num_microbatches_split_batch = split_batch_by_count


class DataSpec:
    """Dataloader with the functions that transform, split and count its batches.

    Args:
        dataloader: Any iterable of batches.
        num_samples: Samples per epoch, over all ranks. If `None`, read from the dataset of a `DataLoader` if it has a
            length.
        num_tokens: Tokens per epoch.
        batch_transforms: Called with each whole batch, still on the host; returns the batch to train with.
        microbatch_transforms: Called with each microbatch, already on the device.
        split_batch: Called as `split_batch(batch, microbatch_size)`; returns the microbatches.
        get_num_samples_in_batch: Returns the number of samples in a batch, a float if a rank holds part of one.
        get_num_tokens_in_batch: Returns the number of tokens in a batch: a number, or a dict with the key `total` and,
            if it differs, `loss_generating`.
        device_transforms: The older name of `microbatch_transforms`. Deprecated.

    Raises:
        TypeError: If the dataloader is not iterable, a count is not a whole number, or a function is not callable.
        ValueError: If a count is negative; if the `DataLoader` has been iterated over with persistent workers; or if
            there are several ranks and none of its samplers has `num_replicas` and `rank`, as sharding samplers do.

    Example:
        >>> spec = DataSpec([["a", "b", "c"]], split_batch=lambda batch, size: [batch[:size], batch[size:]])
        >>> [spec.split_batch(batch, 2) for batch in spec.dataloader]
        [[['a', 'b'], ['c']]]
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Any], Any] | None = None,
        microbatch_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[[Any, int | float], Sequence[Any]] | None = None,
        get_num_samples_in_batch: Callable[[Any], int | float] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int | dict[str, int]] | None = None,
        *,
        device_transforms: Callable[[Any], Any] | None = None,
    ) -> None:
        if not hasattr(dataloader, "__iter__"):
            raise TypeError(
                f"dataloader={dataloader!r} is not an iterable of batches. Give a torch DataLoader, or a list of them."
            )
        if device_transforms is not None:
            microbatch_transforms = _renamed_transforms(device_transforms, microbatch_transforms)
        check_functions(
            batch_transforms=batch_transforms,
            microbatch_transforms=microbatch_transforms,
            split_batch=split_batch,
            get_num_samples_in_batch=get_num_samples_in_batch,
            get_num_tokens_in_batch=get_num_tokens_in_batch,
        )
        counts = {"num_samples": num_samples, "num_tokens": num_tokens}
        check_counts(0, **{name: count for name, count in counts.items() if count is not None})
        self.dataloader: Any = dataloader
        self.num_tokens = num_tokens
        self.batch_transforms = batch_transforms or _unchanged
        self.microbatch_transforms = microbatch_transforms or _unchanged
        self.split_batch = split_batch or default_split_batch
        self.get_num_samples_in_batch: Callable[[Any], int | float] = get_num_samples_in_batch or count_samples
        self._count_tokens = get_num_tokens_in_batch or self._default_get_num_tokens_in_batch
        self.num_samples = num_samples
        data = loaded("torch.utils.data")  # a DataLoader exists only if this module has been imported
        if data is not None and isinstance(dataloader, data.DataLoader):
            if cast(Any, dataloader)._iterator is not None:  # set only by a DataLoader with persistent workers
                raise ValueError(
                    f"The dataloader {dataloader!r} has an active iterator: its persistent workers have already begun "
                    f"to read samples. Make a new DataLoader, or do not iterate over this one before training."
                )
            _refuse_undistributed(dataloader)
            if num_samples is None:
                self.num_samples = length_or_none(cast(Any, dataloader).dataset)

    @property
    def counts_by_default(self) -> bool:
        """Return whether batches are transformed, split and counted by the default functions only."""
        given = (self.batch_transforms, self.microbatch_transforms, self.split_batch, self.get_num_samples_in_batch)
        return given == (_unchanged, _unchanged, default_split_batch, count_samples)

    @property
    def counts_tokens_by_default(self) -> bool:
        """Return whether tokens are counted by the default function, which includes padding."""
        # Not `is`, because each access creates another bound method.
        return self._count_tokens == self._default_get_num_tokens_in_batch

    def get_num_tokens_in_batch(self, batch: Any, token_type: str = "total") -> int:
        """Count the tokens of one kind in a batch.

        Args:
            batch: As the dataloader yields it.
            token_type: `'total'`, or `'loss_generating'` for tokens that contribute to the loss. A count that is a
                plain number applies to every kind.

        Raises:
            ValueError: If the count is a dict without that kind, or neither a whole number nor a dict.
        """
        count: Any = self._count_tokens(batch)
        if isinstance(count, int):
            return count
        if not isinstance(count, Mapping):
            raise ValueError(
                f"get_num_tokens_in_batch returned {count!r} of type {type(count).__name__!r}. It returns a whole "
                f"number, or a dict of whole numbers with the key 'total'."
            )
        counts = cast("Mapping[str, int]", count)
        if token_type not in counts:
            raise ValueError(
                f"token_type={token_type!r} is not among the kinds of tokens that get_num_tokens_in_batch counts: "
                f"{sorted(counts)}. Add it to the dict that it returns."
            )
        return counts[token_type]

    def _default_get_num_tokens_in_batch(self, batch: Any) -> int:
        max_sequence_length: int | None = getattr(getattr(self.dataloader, "dataset", None), "max_seq_len", None)
        # Only if needed, because counting samples may be slow or fail.
        num_samples = 0 if max_sequence_length is None else self.get_num_samples_in_batch(batch)
        return _count_tokens(batch, max_sequence_length, num_samples)


def ensure_data_spec(dataloader: Any) -> DataSpec:
    """Wrap a dataloader, or a dict of keyword arguments, in a `DataSpec`; return a `DataSpec` unchanged.

    Raises:
        TypeError: If a dict has an unknown key, or no `dataloader`.
    """
    if isinstance(dataloader, DataSpec):
        return dataloader
    if not isinstance(dataloader, dict):
        return DataSpec(dataloader)
    settings = cast("dict[str, Any]", dataloader)
    accepted = list(inspect.signature(DataSpec).parameters)
    unknown = [repr(key) for key in settings if key not in accepted]
    if not unknown and "dataloader" in settings:
        return DataSpec(**settings)
    fault = (
        f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown" if unknown else "'dataloader' is missing"
    )
    raise TypeError(
        f"A dict in the place of a dataloader holds the arguments of one DataSpec. This one has the keys "
        f"{list(settings)!r}, and {fault}. Accepted are {', '.join(accepted)}. For several dataloaders to evaluate on, "
        f"give a list with an Evaluator(label=..., dataloader=...) for each."
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _renamed_transforms(old: Callable[[Any], Any], new: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    if new is not None:
        raise ValueError(
            f"device_transforms={old!r} and microbatch_transforms={new!r} are two names of one thing. Pass only "
            f"microbatch_transforms."
        )
    warnings.warn(
        "DataSpec(device_transforms=...) is now microbatch_transforms=...; the old name will be removed in release "
        "1.0.",
        DeprecationWarning,
        stacklevel=3,
    )
    return old


def _refuse_undistributed(dataloader: Any) -> None:
    world_size = get_world_size()
    if world_size == 1:
        return
    data = loaded("torch.utils.data")
    # An iterable dataset has no sampler and must shard its samples itself.
    if isinstance(dataloader.dataset, data.IterableDataset):
        return
    samplers = samplers_of(dataloader)
    if any(hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") for sampler in samplers):
        return
    names = " over a ".join(type(sampler).__name__ for sampler in samplers)
    raise ValueError(
        f"The dataloader's sampler is {names}, which does not say which rank it reads for. If all have the same "
        f"dataset, each of the {world_size} ranks would read all of it: pass sampler=get_sampler(dataset), of "
        f"composer.utils.dist, to the DataLoader, or torch's DistributedSampler. If each rank has a dataset of its "
        f"own, or ranks hold tensors together and need the same samples, say so by num_replicas=1 and rank=0 of "
        f"either. A sampler that shards by itself says so by its attributes num_replicas and rank."
    )


def size_of_batches(dataloader: Any) -> Any:
    """Return the batch size of a dataloader, or `None` if it is unknown."""
    size = getattr(dataloader, "batch_size", None)
    # With a custom batch_sampler, the `batch_size` of the DataLoader is None.
    return getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None) if size is None else size


def samplers_of(dataloader: Any) -> list[Any]:
    """Return the samplers of a DataLoader, the outermost first.

    Args:
        dataloader: A DataLoader. If it was made with a `batch_sampler`, its `sampler` is never used.
    """
    samplers: list[Any] = []
    sampler = dataloader.batch_sampler if dataloader.batch_size is None else dataloader.sampler
    if sampler is None:  # batching is disabled, so it reads single samples
        sampler = dataloader.sampler
    # By identity, because samplers may wrap each other in a cycle.
    while sampler is not None and not any(sampler is one for one in samplers):
        samplers.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return samplers


def _count_tokens(batch: Any, max_sequence_length: int | None, num_samples: int | float) -> int:
    """Return the product of the first two dimensions of `input_ids`, or samples times the maximum length, or 0.

    Padding is included.
    """
    # Lists and tuples first, because the ABC check is slow for types that are not a Mapping.
    if type(batch) not in (list, tuple) and isinstance(batch, Mapping) and "input_ids" in batch:
        input_ids: Any = cast("Mapping[str, Any]", batch)["input_ids"]
        shape = getattr(input_ids, "shape", None)
        if shape is None:
            return sum(map(len, input_ids))
        return int(shape[0]) * (int(shape[1]) if len(shape) > 1 else 1)
    if max_sequence_length is not None:
        return int(max_sequence_length * num_samples)
    return 0
