"""RandAugment: apply a few random augmentations to each image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from PIL.Image import Image
from torch import Tensor

from composer_algorithms._arguments import check_counts, check_interval
from composer_algorithms.augmentation import (
    AugmentationFunction,
    augmentation_sets,
    change,
    check_mode,
    find_set,
    map_pillow_function,
)
from composer_algorithms.dataset_transforms import TransformedDatasets
from composer_algorithms.metadata import METHODS

__all__ = ["RandAugment", "RandAugmentTransform", "randaugment_image", "METADATA"]

METADATA = METHODS["randaugment"]

TImage = TypeVar("TImage", bound=Tensor | Image)


def randaugment_image(
    img: Tensor | Image | None = None,
    severity: float = 9,
    depth: int = 2,
    augmentation_set: str | Sequence[AugmentationFunction] = augmentation_sets["all"],
) -> Any:
    """Apply a sequence of randomly chosen augmentations to an image.

    Random numbers come from PyTorch's default generator.

    Args:
        img: PIL image of mode RGB or L, or a tensor as for `map_pillow_function`. Without it, the function returns a
            transform for a dataset.
        severity: Maximum strength of the augmentations, in [0, 10].
        depth: Number of augmentations.
        augmentation_set: Functions to choose from: a list, or a name in `augmentation_sets`.

    Returns:
        The augmented image, of the same type as the input.

    Raises:
        ValueError: If `severity` is outside [0, 10] or `depth` is negative.
        KeyError: If the name of the set is unknown.

    Example:
        >>> import torch
        >>> randaugment_image(torch.zeros(3, 8, 8, dtype=torch.uint8)).shape
        torch.Size([3, 8, 8])

    Reference:
        Cubuk et al., "Randaugment: Practical automated data augmentation with a reduced search space", CVPRW 2020,
        arXiv:1909.13719. In the paper every augmentation has the maximum strength; here each draws its own, up to
        `severity`.
    """
    transform = RandAugmentTransform(severity, depth, augmentation_set)
    return transform if img is None else transform(img)


class RandAugmentTransform:
    """Dataset transform that applies `randaugment_image` to each image.

    It takes the same arguments as `randaugment_image`, without the image.
    """

    def __init__(
        self, severity: float = 9, depth: int = 2, augmentation_set: str | Sequence[AugmentationFunction] = "all"
    ) -> None:
        check_interval("[0, 10]", severity=severity)
        check_counts(0, depth=depth)
        self.severity = severity
        self.depth = depth
        self.augmentation_set = find_set(augmentation_set)

    def __call__(self, img: TImage) -> TImage:
        """Return an augmented image."""
        return map_pillow_function(self._change, img)

    def __repr__(self) -> str:
        names = ", ".join(getattr(function, "__name__", repr(function)) for function in self.augmentation_set)
        return f"RandAugmentTransform(severity={self.severity!r}, depth={self.depth!r}, augmentation_set=[{names}])"

    def _change(self, image: Image) -> Image:
        # Before the draw, so that an unsupported mode always fails, not only with some of the functions.
        check_mode(image, self.augmentation_set)
        return change(image, self.augmentation_set, self.depth, self.severity)


@dataclass(repr=False, eq=False)
class RandAugment(TransformedDatasets):
    """Apply a few random augmentations to each training image.

    On `FIT_START` it adds a `RandAugmentTransform` to the training dataset, before the transforms that convert images
    to tensors. The dataset must be a torchvision dataset in a torch `DataLoader`. Random numbers come from PyTorch's
    default generator in the process that loads the image.

    Args:
        severity: Maximum strength of the augmentations, in [0, 10].
        depth: Number of augmentations.
        augmentation_set: `'all'`, `'safe'` or `'original'`; see `augmentation_sets`.

    Raises:
        ValueError: If `severity` is outside [0, 10] or `depth` is negative.
        KeyError: If the name of the set is unknown.

    Example:
        >>> RandAugment(severity=5)
        RandAugment(severity=5, depth=2, augmentation_set='all')

    Reference:
        Cubuk et al., "Randaugment: Practical automated data augmentation with a reduced search space", CVPRW 2020,
        arXiv:1909.13719.
    """

    severity: float = 9
    depth: int = 2
    augmentation_set: str = "all"

    def __post_init__(self) -> None:
        super().__init__(RandAugmentTransform(self.severity, self.depth, self.augmentation_set))
