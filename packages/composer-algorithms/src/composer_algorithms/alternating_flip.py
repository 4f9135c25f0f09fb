"""Alternating flip: mirror each image in every second epoch, instead of at random."""

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Transpose
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from composer_algorithms._method import Method
from composer_algorithms._tensors import UnsupportedBatchError, is_pil, require_tensor
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State
from composer_events.batches import batch_get, batch_set

__all__ = ["METADATA", "AlternatingFlip", "AlternatingFlipDataset", "alternating_flip_batch"]

METADATA = METHODS["alternating_flip"]

_BITS = 2**32 - 1


def alternating_flip_batch(input: Tensor, indices: Tensor, epoch: int, seed: int = 0) -> Tensor:
    """Mirror the images of a batch that are due in an epoch.

    A hash of an image's index and the seed decides whether the image is mirrored in even or in odd epochs. About half
    of the images are mirrored in each epoch, and any two epochs in sequence show each image both ways.

    Args:
        input: Shape `(batch, ..., width)`. Not changed.
        indices: Index of each image in the dataset, shape `(batch,)`, integers.
        epoch: Number of the epoch.
        seed: Another seed selects other images.

    Returns:
        The images, with the width reversed where due.

    Example:
        >>> images, indices = torch.rand(8, 3, 4, 4), torch.arange(8)
        >>> first, second = (alternating_flip_batch(images, indices, epoch) for epoch in (0, 1))
        >>> torch.equal(first, second.flip(-1))
        True

    Reference:
        Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498.
    """
    due = _is_due(indices.to(input.device).long(), epoch, seed).bool()
    return torch.where(due.view(-1, *[1] * (input.ndim - 1)), input.flip(-1), input)


class AlternatingFlipDataset(Subset[Any]):
    """Dataset with each image of another one mirrored in every second epoch, as by `alternating_flip_batch`.

    Call `set_epoch` before each epoch, as a Trainer does. Leave random flips out of the transforms of the dataset.

    Args:
        dataset: A map-style dataset with a length, of images or of samples with an image: tensors of shape
            `(..., width)` or PIL images. Its samples are not changed.
        seed: See `alternating_flip_batch`.
        input_key: Index, key or `(getter, setter)` pair of the image in a sample.

    Example:
        >>> dataset = AlternatingFlipDataset([(torch.tensor([[1, 2]]), 0)])
        >>> seen = []
        >>> for epoch in range(2):
        ...     dataset.set_epoch(epoch)
        ...     seen.append(dataset[0][0].tolist())
        >>> sorted(seen)
        [[[1, 2]], [[2, 1]]]
    """

    def __init__(self, dataset: Dataset[Any], seed: int = 0, input_key: Any = 0) -> None:
        super().__init__(dataset, range(len(dataset)))  # pyright: ignore[reportArgumentType]  # most have a length
        self.seed = seed
        self.input_key = input_key
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # read by persistent workers, too

    def set_epoch(self, epoch: int) -> None:
        """Select the images to mirror."""
        self._epoch.fill_(epoch)

    def __getitem__(self, idx: Any) -> Any:
        """Return one sample."""
        return self._flipped(super().__getitem__(idx), idx)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples of a batch."""
        return [self._flipped(*each) for each in zip(super().__getitems__(indices), indices, strict=True)]

    def _flipped(self, sample: Any, index: Any) -> Any:
        if not _is_due(operator.index(index), int(self._epoch), self.seed):
            return sample
        if isinstance(sample, Tensor) or is_pil(sample):
            return _mirrored(sample)
        try:
            image = _mirrored(batch_get(sample, self.input_key))
        except (LookupError, AttributeError) as error:
            entries = f" with the entries {list(sample)}" if isinstance(sample, Mapping) else ""
            raise UnsupportedBatchError(
                f"input_key={self.input_key!r} selects nothing in a {type(sample).__qualname__}{entries}:"
                f" pass the index, the key, or a (getter, setter) pair of the image as input_key."
            ) from error
        return batch_set(copy.copy(sample), self.input_key, image)  # a copy, since the dataset may hold the sample


@dataclass(repr=False, eq=False)
class AlternatingFlip(Method):
    """Mirror each image in every second epoch.

    On `FIT_START` the dataset of the training dataloader is wrapped in an `AlternatingFlipDataset`, with the seed of
    the run. Which images are mirrored depends only on that seed, their indices and the epoch: not on the order, the
    ranks, the workers or a resume. Leave random flips out of the transforms of the dataset.

    Args:
        input_key: Index, key or `(getter, setter)` pair of the image in a sample of the dataset.

    Raises:
        TypeError: On `FIT_START`, if the training dataloader is not a torch `DataLoader` with a map-style dataset.

    Example:
        >>> AlternatingFlip()
        AlternatingFlip(input_key=0)

    Reference:
        See `alternating_flip_batch`. The paper draws the flips of the first epoch; here a hash replaces the draw.
    """

    acts_on = frozenset({Event.FIT_START, Event.EPOCH_START})

    input_key: Any = 0

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Wrap the dataset on FIT_START, and select the images of the epoch."""
        loader = state.dataloader
        if event == Event.FIT_START:
            if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
                raise TypeError(
                    f"AlternatingFlip needs the index of each image, which a torch DataLoader with a map-style dataset "
                    f"has, and the dataloader is a {type(loader).__qualname__}: use one, or leave AlternatingFlip out."
                )
            dataset: Any = loader.dataset
            inner = dataset.dataset if isinstance(dataset, AlternatingFlipDataset) else dataset
            wrapped = AlternatingFlipDataset(inner, state.rank_zero_seed, self.input_key)
            # A DataLoader does not allow an assignment once it has been constructed.
            object.__setattr__(loader, "dataset", wrapped)
        # Also on FIT_START, for a resume within an epoch.
        state.dataloader.dataset.set_epoch(int(state.timestamp.epoch))


def _is_due(index: Any, epoch: int, seed: int) -> Any:
    """Return 1 where an image is to be mirrored, else 0, for an integer or for a tensor of them."""
    mixed = index * 0x9E3779B1 + (seed * 0x85EBCA77 & _BITS) & _BITS
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the last steps of MurmurHash3
        mixed = (mixed ^ mixed >> shift) * factor & _BITS
    return (mixed ^ mixed >> 16) + epoch & 1


def _mirrored(image: Any) -> Any:
    if is_pil(image):
        return image.transpose(Transpose.FLIP_LEFT_RIGHT)
    return require_tensor(image, "the image of a sample").flip(-1)
