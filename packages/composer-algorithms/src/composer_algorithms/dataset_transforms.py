"""Insertion of an image transform at the right place among the transforms of a dataset."""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from composer_algorithms._method import Method
from composer_events import Event, Logger, State

if TYPE_CHECKING:
    from torchvision.datasets import VisionDataset

__all__ = ["TransformedDatasets", "add_vision_dataset_transform"]

# Composer's logger name, which users' logging configurations refer to.
_log = logging.getLogger("composer.utils.misc")

Transform = Callable[[Any], Any]


def add_vision_dataset_transform(
    dataset: "VisionDataset | Dataset[Any]", transform: Transform, is_tensor_transform: bool = False
) -> None:
    """Add an image transform to the transforms of a dataset, in place.

    It is inserted before the first transform that converts the image to a tensor (`ToTensor`, `PILToTensor`, `ToImage`
    of torchvision's `transforms` or `transforms.v2`), or after it; without one, at the end. The new order is logged as
    a warning, since another order may have been intended.

    Args:
        dataset: A torchvision dataset, or a `Subset` or `ConcatDataset` of such. Its `transform` is replaced; a
            `Compose` shared with other datasets is not changed.
        transform: Takes and returns an image.
        is_tensor_transform: Whether it works on tensors and has to follow the conversion.

    Raises:
        TypeError: If the dataset is of another kind.
        ValueError: If the dataset transforms image and target together (`transforms=`), which leaves no place for a
            transform of the image alone.

    Example:
        >>> from torchvision.datasets import FakeData
        >>> from torchvision.transforms import ToTensor
        >>> dataset = FakeData(transform=ToTensor())
        >>> add_vision_dataset_transform(dataset, lambda image: image.rotate(90))
        >>> [type(step).__name__ for step in dataset.transform.transforms]
        ['function', 'ToTensor']
    """
    for part in dict.fromkeys(_vision_datasets(dataset)):  # each dataset once, even if several subsets share it
        _add(part, transform, is_tensor_transform)


class TransformedDatasets(Method):
    """Base of the algorithms that insert a transform into the training dataset, once into each."""

    acts_on = frozenset({Event.FIT_START})

    def __init__(self, transform: Transform) -> None:
        self._transform = transform
        self._done: WeakSet[Dataset[Any]] = WeakSet()  # weak, to not keep finished datasets alive

    def match(self, event: Event, state: State) -> bool:
        """Return whether training starts on a dataset without the transform."""
        if event != Event.FIT_START:
            return False
        if not isinstance(state.dataloader, DataLoader):
            raise TypeError(
                f"{type(self).__name__} adds a transform to the dataset of a torch DataLoader, and the dataloader is a "
                f"{type(state.dataloader).__qualname__}: use a torch DataLoader, or put {self._transform!r} among your "
                f"own transforms."
            )
        return any(part not in self._done for part in _parts(state.dataloader.dataset))

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Add the transform to the training dataset."""
        for part in dict.fromkeys(_vision_datasets(state.dataloader.dataset)):
            if part not in self._done:
                add_vision_dataset_transform(part, self._transform)
                self._done.add(part)


def _vision_datasets(dataset: Any) -> "Iterator[VisionDataset]":
    from torchvision.datasets import VisionDataset  # slow to load, and needed for images only

    for part in _parts(dataset):
        if not isinstance(part, VisionDataset):
            raise TypeError(
                f"dataset is a {type(part).__qualname__}, whose transforms are not known: pass a dataset that derives "
                f"from torchvision.datasets.VisionDataset, or put the transform among its transforms yourself."
            )
        yield part


def _parts(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Subset):
        yield from _parts(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _parts(part)
    else:
        yield dataset


def _add(dataset: "VisionDataset", transform: Transform, is_tensor_transform: bool) -> None:
    from torchvision.datasets.vision import StandardTransform

    joint = getattr(dataset, "transforms", None)
    if joint is not None and not isinstance(joint, StandardTransform):
        raise ValueError(
            f"dataset.transforms={joint!r} transforms image and target together: put {transform!r} into it yourself, "
            f"or give the dataset transform= and target_transform= instead."
        )
    dataset.transform = _combined(getattr(dataset, "transform", None), transform, is_tensor_transform)
    # Some datasets read `transform`, others `transforms`, which the base class derived from it in its constructor.
    dataset.transforms = StandardTransform(dataset.transform, getattr(dataset, "target_transform", None))
    _log.warning("%s has the transforms %s.", type(dataset).__qualname__, dataset.transform)


def _combined(current: Transform | None, transform: Transform, is_tensor_transform: bool) -> Transform:
    from torchvision import transforms
    from torchvision.transforms import v2

    if current is None:
        return transform
    composes = (transforms.Compose, v2.Compose)
    steps = list(current.transforms) if isinstance(current, composes) else [current]
    makes_tensor = (
        *(transforms.ToTensor, transforms.PILToTensor),
        *(v2.ToTensor, v2.PILToTensor, v2.ToImage),
    )
    place = next((index for index, step in enumerate(steps) if isinstance(step, makes_tensor)), None)
    if place is None:
        steps.append(transform)
    else:
        steps.insert(place + is_tensor_transform, transform)
    # A new Compose, since the old one may be shared with a validation dataset.
    return v2.Compose(steps) if isinstance(current, v2.Compose) else transforms.Compose(steps)
