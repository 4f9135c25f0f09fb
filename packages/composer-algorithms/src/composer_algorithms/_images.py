"""Images as PIL has them and as tensors: telling them apart, and from the one to the other and back."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


def is_pil(value: object) -> "TypeGuard[Image]":
    """Answer whether the value is a PIL image."""
    pil = sys.modules.get("PIL.Image")  # a process that has not imported it has no such image
    return pil is not None and isinstance(value, pil.Image)


def image_size(image: "Tensor | Image") -> tuple[int, int]:
    """Return height and width.

    Raises:
        TypeError: If the value is neither a tensor nor a PIL image.
        ValueError: If a tensor has less than three dims.
    """
    if is_pil(image):
        return image.height, image.width
    if not isinstance(image, Tensor):
        raise TypeError(f"{type(image).__qualname__} is no image: pass a tensor or a PIL image.")
    if image.ndim < 3:
        raise ValueError(
            f"a tensor of shape {tuple(image.shape)} is no image: pass (channels, height, width), or a batch of those."
        )
    return image.shape[-2], image.shape[-1]


def to_pixels(image: Tensor) -> Tensor:
    """Return an image's values as the whole numbers from 0 to 255 that PIL works on; floating point has 0 to 1."""
    if image.dtype == torch.uint8:
        return image
    if image.is_floating_point():
        return (image.float() * 255).round_().clamp_(0, 255).to(torch.uint8)
    raise TypeError(f"an image of dtype {image.dtype} cannot be a PIL image: pass uint8, or floating point in [0, 1].")


def from_pixels(pixels: Tensor, like: Tensor) -> Tensor:
    """Return whole numbers from 0 to 255 in the dtype, the range and on the device of another image."""
    pixels = pixels.to(like.device)
    return pixels if like.dtype == torch.uint8 else pixels.to(like.dtype).div_(255)
