"""A transform of images, put in the right place among those that a dataset has."""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from composer_events.event import Event

if TYPE_CHECKING:
    from torchvision.datasets import VisionDataset

    from composer_events.state import State

__all__ = ["TransformedDatasets", "add_vision_dataset_transform"]

# Users' log settings know Composer's names of loggers.
_log = logging.getLogger("composer.utils.misc")

Transform = Callable[[Any], Any]


def add_vision_dataset_transform(
    dataset: "VisionDataset | Dataset[Any]", transform: Transform, is_tensor_transform: bool = False
) -> None:
    """Add a transform of images to those of a dataset, in place.

    It goes before the first transform that makes a tensor of the image (`ToTensor`, `PILToTensor`, `ToImage`, of
    torchvision's `transforms` or `transforms.v2`), or after that one; where none does, to the end. Where the transform
    now stands is logged as a warning, since other orders may have been meant.

    Args:
        dataset: One of torchvision's, or a `Subset` or `ConcatDataset` of such. Its `transform` is replaced; a
            `Compose` that other datasets share stays as it is.
        transform: Takes and returns an image.
        is_tensor_transform: Whether it works on tensors, and must come after what makes them.

    Raises:
        TypeError: If the dataset is of another kind.
        ValueError: If the dataset transforms image and target together (`transforms=`), where a transform of the image
            alone has no place.

    Example:
        >>> from torchvision.datasets import FakeData
        >>> from torchvision.transforms import ToTensor
        >>> dataset = FakeData(transform=ToTensor())
        >>> add_vision_dataset_transform(dataset, lambda image: image.rotate(90))
        >>> [type(step).__name__ for step in dataset.transform.transforms]
        ['function', 'ToTensor']
    """
    for part in dict.fromkeys(_vision_datasets(dataset)):  # each once, of however many subsets of it there are
        _add(part, transform, is_tensor_transform)


class TransformedDatasets:
    """Give each training dataset a transform, once.

    Args:
        owner: Whose transform it is, for the messages.
        transform: The transform.
    """

    def __init__(self, owner: str, transform: Transform) -> None:
        self._owner = owner
        self._transform = transform
        self._done: WeakSet[Dataset[Any]] = WeakSet()

    def is_due(self, event: Event, state: "State") -> bool:
        """Answer whether training begins with a dataset that does not have the transform yet.

        Raises:
            TypeError: If the dataset is not known, because the dataloader is not PyTorch's.
        """
        if event != Event.FIT_START:
            return False
        if not isinstance(state.dataloader, DataLoader):
            raise TypeError(
                f"{self._owner} adds a transform to the dataset of a torch DataLoader, and the dataloader is a "
                f"{type(state.dataloader).__qualname__}: use a torch DataLoader, or put {self._transform!r} among your "
                f"own transforms."
            )
        return any(part not in self._done for part in _parts(state.dataloader.dataset))

    def add(self, state: "State") -> None:
        """Give the dataset the transform.

        Raises:
            TypeError: If the dataset is not one of torchvision's.
        """
        for part in dict.fromkeys(_vision_datasets(state.dataloader.dataset)):
            if part not in self._done:
                add_vision_dataset_transform(part, self._transform)
                self._done.add(part)


def _vision_datasets(dataset: Any) -> "Iterator[VisionDataset]":
    from torchvision.datasets import VisionDataset  # slow to load, and not everyone has images

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
    # Some datasets read `transform`, some `transforms`, which the base class has made of the former.
    dataset.transforms = StandardTransform(dataset.transform, getattr(dataset, "target_transform", None))
    _log.warning("%s has the transforms %s now.", type(dataset).__qualname__, dataset.transform)


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
    return v2.Compose(steps) if isinstance(current, v2.Compose) else transforms.Compose(steps)
