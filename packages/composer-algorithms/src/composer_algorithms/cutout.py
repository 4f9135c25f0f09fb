"""CutOut: black out squares of images."""

from numbers import Integral
from typing import Any, TypeVar, cast

import torch
from PIL.Image import Image
from torch import Tensor

from composer_algorithms._arguments import accept_legacy_arguments, check_counts, check_interval, warn_deprecated
from composer_algorithms._draws import ResumableDraws, draw_integer
from composer_algorithms._method import Method, NamedArguments
from composer_algorithms._tensors import batch_tensor, image_size, is_pil
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State

__all__ = ["CutOut", "CutOutTransform", "cutout_batch", "METADATA"]

METADATA = METHODS["cutout"]

TImage = TypeVar("TImage", bound=Tensor | Image)


@accept_legacy_arguments("cutout_batch", renamed={"n_holes": "num_holes", "X": "input"})
def cutout_batch(
    input: Tensor | Image | None = None,
    num_holes: int = 1,
    length: float = 0.5,
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Any:
    """Set squares of an image, or the same squares of all images in a batch, to zero.

    The side of the squares is `length` times the shorter side of the image, rounded down to an even number of pixels.
    Their centers are drawn, and parts outside the image are cut off. The input is not changed.

    Args:
        input: A tensor of shape `(channels, height, width)` or `(batch, channels, height, width)`, or a PIL image. If
            omitted, the function returns a transform for a dataset.
        num_holes: Number of squares, which may overlap.
        length: Side as a fraction of the shorter side of the image, in [0, 1].
        uniform_sampling: Draw the centers from a range that extends beyond the image by half a square, so that all
            pixels are equally likely to be covered. Otherwise they are drawn from the pixels of the image, which favors
            the middle.
        generator: CPU generator of the random numbers. PyTorch's default generator when `None`.

    Returns:
        The image or batch with its squares, in the type of the input.

    Raises:
        ValueError: If `length` is outside [0, 1], `num_holes` is negative, or a tensor lacks the shape of an image.
        TypeError: If the input is neither a tensor nor a PIL image.

    Example:
        >>> cutout_batch(torch.ones(1, 4, 4), length=1.0).sum() < 16
        tensor(True)

    Reference:
        DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout", 2017,
        arXiv:1708.04552.
    """
    if input is None:
        return CutOutTransform(num_holes, length, uniform_sampling)
    _check(num_holes, length)
    height, width = image_size(input)
    shorter = min(height, width)
    side = int(length) if _is_in_pixels(length) else int(shorter * length)
    if _is_in_pixels(length):
        warn_deprecated(  # here, since only now the size of the images is known
            f"length={length!r} as a number of pixels is deprecated: pass it as a part of the side, "
            f"{length / shorter:.3g} for these images.",
            stacklevel=3,
        )
    result = input.copy() if is_pil(input) else cast("Tensor", input).clone()
    beyond = side // 2 if uniform_sampling else 0  # pixels outside the image where a center may lie
    for _ in range(num_holes):
        y, x = (draw_integer(-beyond, size + beyond, generator) for size in (height, width))
        if is_pil(result):
            # PIL images are changed by paste: they have no assignment to slices.
            left, top, right, bottom = _square(width, height, x, y, side)
            result.paste(0, (left, top, right, bottom))
        else:
            _generate_mask(cast("Tensor", result), width, height, x, y, side)
    return result


def _generate_mask(mask: Tensor, width: int, height: int, x: int, y: int, cutout_length: int) -> Tensor:
    """Set a square around a point to zero, in place. Composer's name and arguments, for users' tests that call it."""
    left, top, right, bottom = _square(width, height, x, y, cutout_length)
    mask[..., top:bottom, left:right] = 0
    return mask


def _square(width: int, height: int, x: int, y: int, length: int) -> tuple[int, int, int, int]:
    half = length // 2
    return (
        *(min(max(x - half, 0), width), min(max(y - half, 0), height)),
        *(min(max(x + half, 0), width), min(max(y + half, 0), height)),
    )


class CutOutTransform(NamedArguments):
    """Dataset transform that applies `cutout_batch`.

    It takes the same arguments as `cutout_batch`, without the input.

    Example:
        >>> CutOutTransform()(torch.ones(3, 8, 8)).shape
        torch.Size([3, 8, 8])
    """

    def __init__(self, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False) -> None:
        _check(num_holes, length)
        self.num_holes = num_holes
        self.length = length
        self.uniform_sampling = uniform_sampling

    def __call__(self, image: TImage) -> TImage:
        """Return the image with its squares."""
        return cutout_batch(image, self.num_holes, self.length, self.uniform_sampling)


class CutOut(ResumableDraws, Method):
    """Black out squares in the images of each batch, the same ones in all images.

    On `AFTER_DATALOADER` the inputs in `state.batch` are replaced with their `cutout_batch`.

    Args:
        num_holes: Number of squares.
        length: Their side as a fraction of the shorter side of the image, in [0, 1].
        uniform_sampling: See `cutout_batch`.
        input_key: Index, key or `(getter, setter)` pair of the inputs in the batch.

    Raises:
        ValueError: If `length` is outside [0, 1] or `num_holes` is negative.

    Example:
        >>> CutOut(length=0.25)
        CutOut(num_holes=1, length=0.25, uniform_sampling=False, input_key=0)

    Reference:
        DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout", 2017,
        arXiv:1708.04552. The paper draws squares for each image separately.
    """

    schedulable = ("length",)
    acts_on = frozenset({Event.AFTER_DATALOADER})

    @accept_legacy_arguments("CutOut", renamed={"n_holes": "num_holes"})
    def __init__(
        self, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False, input_key: Any = 0
    ) -> None:
        _check(num_holes, length)
        self.num_holes = num_holes
        self.length = length
        self.uniform_sampling = uniform_sampling
        self.input_key = input_key

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Black out squares of the inputs."""
        input = batch_tensor(state, self.input_key, "input_key")
        generator = self.next_generator(state)
        output = cutout_batch(input, self.num_holes, self.length, self.uniform_sampling, generator=generator)
        state.batch_set_item(self.input_key, output)


def _check(num_holes: int, length: float) -> None:
    check_counts(0, num_holes=num_holes)
    if not _is_in_pixels(length):
        check_interval("[0, 1]", length=length)


def _is_in_pixels(length: float) -> bool:
    # Older releases took the length in pixels, which is still accepted with a warning.
    return isinstance(length, Integral) and length > 1
