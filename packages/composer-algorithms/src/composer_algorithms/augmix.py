"""AugMix: mix each image with several chains of augmentations of itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

import torch
from PIL.Image import Image, frombytes
from torch import Tensor

from composer_algorithms._arguments import check_counts, check_interval
from composer_algorithms._draws import draw_beta, draw_dirichlet, draw_integer
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

__all__ = ["AugMix", "AugmentAndMixTransform", "augmix_image", "METADATA"]

METADATA = METHODS["augmix"]

TImage = TypeVar("TImage", bound=Tensor | Image)


def augmix_image(
    img: Tensor | Image | None = None,
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: str | Sequence[AugmentationFunction] = augmentation_sets["all"],
) -> Any:
    """Mix an image with several chains of augmentations of itself.

    With weights `w` drawn from `Dirichlet(alpha, ..., alpha)` and `m` from `Beta(alpha, alpha)` the result is
    `(1 - m) * image + m * sum(w[i] * chain[i])`, rounded down. Random numbers come from PyTorch's default generator.

    Args:
        img: A PIL image of mode RGB or L, or a tensor as in `map_pillow_function`. If omitted, the function returns a
            transform for a dataset.
        severity: Maximal strength of the augmentations, in [0, 10].
        depth: Number of augmentations per chain; 0 or less draws 1, 2 or 3 for each chain.
        width: Number of chains, at least one.
        alpha: Above 0; larger values make the weights more equal.
        augmentation_set: Functions to choose from: a list, or a name in `augmentation_sets`.

    Returns:
        The mixed image, in the type of the input.

    Raises:
        ValueError: If `severity` is outside [0, 10], `width` is less than 1, or `alpha` is not above 0.
        KeyError: If no set has that name.

    Example:
        >>> augmix_image(torch.zeros(3, 8, 8, dtype=torch.uint8)).shape
        torch.Size([3, 8, 8])

    Reference:
        Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty", ICLR 2020,
        arXiv:1912.02781, algorithm 1.
    """
    transform = AugmentAndMixTransform(severity, depth, width, alpha, augmentation_set)
    return transform if img is None else transform(img)


class AugmentAndMixTransform:
    """Dataset transform that applies `augmix_image`.

    It takes the same arguments as `augmix_image`, without the image.
    """

    def __init__(
        self,
        severity: float = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: str | Sequence[AugmentationFunction] = "all",
    ) -> None:
        check_interval("[0, 10]", severity=severity)
        check_interval("(0, inf)", alpha=alpha)
        check_counts(width=width)
        if not isinstance(depth, Integral):
            raise TypeError(f"depth={depth!r} is not a whole number: pass a number of changes, or 0 to draw it.")
        self.severity = severity
        self.depth = depth
        self.width = width
        self.alpha = alpha
        self.augmentation_set = find_set(augmentation_set)

    def __call__(self, img: TImage) -> TImage:
        """Return the mixed image."""
        return map_pillow_function(self._mix, img)

    def __repr__(self) -> str:
        names = ", ".join(getattr(function, "__name__", repr(function)) for function in self.augmentation_set)
        return (
            f"AugmentAndMixTransform(severity={self.severity!r}, depth={self.depth!r}, width={self.width!r}, "
            f"alpha={self.alpha!r}, augmentation_set=[{names}])"
        )

    def _mix(self, image: Image) -> Image:
        check_mode(image, self.augmentation_set)
        weights = draw_dirichlet(self.alpha, self.width)
        mixing = draw_beta(self.alpha)
        # In float32 and in place; the copy from uint8 is the only one.
        mixed = _values(image).float().mul_(1 - mixing)
        for weight in weights:
            depth = self.depth if self.depth > 0 else draw_integer(1, 4)
            chain = change(image, self.augmentation_set, depth, self.severity)
            mixed.add_(_values(chain), alpha=mixing * weight)
        # uint8 rounds down, as documented.
        return frombytes(image.mode, image.size, mixed.to(torch.uint8).numpy().tobytes())


@dataclass(repr=False, eq=False)
class AugMix(TransformedDatasets):
    """Mix each training image with several chains of augmentations of itself.

    On `FIT_START` an `AugmentAndMixTransform` is inserted into the training dataset, before the conversion to tensors.
    The dataset must be a torchvision dataset in a torch `DataLoader`. Random numbers come from PyTorch's default
    generator in the process that loads the image.

    Args:
        severity: Maximal strength of the augmentations, in [0, 10].
        depth: Number of augmentations per chain; 0 or less draws 1, 2 or 3 for each chain.
        width: Number of chains, at least one.
        alpha: Above 0; larger values make the weights more equal.
        augmentation_set: `'all'`, `'safe'` or `'original'`; see `augmentation_sets`.

    Raises:
        ValueError: If `severity` is outside [0, 10], `width` is less than 1, or `alpha` is not above 0.
        KeyError: If no set has that name.

    Example:
        >>> AugMix(severity=2)
        AugMix(severity=2, depth=-1, width=3, alpha=1.0, augmentation_set='all')

    Reference:
        Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty", ICLR 2020,
        arXiv:1912.02781. Its consistency loss is not included.
    """

    severity: float = 3
    depth: int = -1
    width: int = 3
    alpha: float = 1.0
    augmentation_set: str = "all"

    def __post_init__(self) -> None:
        # Built here, so that wrong arguments raise now and not at the start of training.
        super().__init__(
            AugmentAndMixTransform(self.severity, self.depth, self.width, self.alpha, self.augmentation_set)
        )


def _values(image: Image) -> Tensor:
    # A bytearray, since torch warns about buffers that are not writable.
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
