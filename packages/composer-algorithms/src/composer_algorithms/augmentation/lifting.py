"""Functions of PIL images, applied to tensors as well."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from PIL.Image import Image, frombytes, merge
from torch import Tensor

from composer_algorithms._images import from_pixels, is_pil, to_pixels

__all__ = ["image_as_type", "map_pillow_function", "pil_to_pixels", "pixels_to_pil"]

TImage = TypeVar("TImage", bound=Tensor | Image)

_MODES = {1: "L", 3: "RGB"}


def map_pillow_function(f_pil: Callable[[Image], Image], imgs: TImage) -> TImage:
    """Apply a function of PIL images to an image of any kind.

    Args:
        f_pil: Takes and returns a PIL image.
        imgs: A PIL image, or a tensor of shape `(channels, height, width)` or `(batch, channels, height, width)` with
            one or three channels: uint8, or floating point in [0, 1], which is rounded to 256 values on the way.

    Returns:
        The result of the type of the input: dtype, range of values and device are kept. Each image of a batch goes
        through the function by itself.

    Raises:
        TypeError: If the input is neither, or its dtype has no place for it.
        ValueError: If a tensor has another shape.

    Example:
        >>> image = torch.tensor([[[0, 255]]], dtype=torch.uint8)
        >>> map_pillow_function(lambda pil_img: pil_img.rotate(180), image)
        tensor([[[255,   0]]], dtype=torch.uint8)
    """
    if is_pil(imgs):
        return cast("TImage", f_pil(imgs))
    if not isinstance(imgs, Tensor):
        raise TypeError(f"{type(imgs).__qualname__} is no image: pass a tensor or a PIL image.")
    _check_shape(imgs)
    images = to_pixels(imgs.detach()).cpu()
    if len(images) == 0:
        return cast("TImage", imgs.clone())
    if images.ndim == 3:
        return cast("TImage", from_pixels(_lifted(f_pil, images), like=imgs))
    return cast("TImage", from_pixels(torch.stack([_lifted(f_pil, image) for image in images]), like=imgs))


def image_as_type(image: Tensor | Image, typ: type) -> Any:
    """Turn an image into a tensor or a PIL image.

    Args:
        image: A PIL image, or a tensor of shape `(channels, height, width)`.
        typ: `torch.Tensor` or `PIL.Image.Image`.

    Returns:
        The image itself if it is of the type, also where it is a batch. Otherwise a float32 tensor in [0, 1] or a PIL
        image.

    Raises:
        TypeError: If the type is neither of the two.
        ValueError: If a tensor that is to be a PIL image has another shape.
    """
    if typ not in (Tensor, Image):
        raise TypeError(f"typ={typ!r} is no type of image: pass torch.Tensor or PIL.Image.Image.")
    if isinstance(image, typ):
        return image
    if is_pil(image):
        return pil_to_pixels(image).float().div_(255)
    tensor = cast("Tensor", image)
    if tensor.ndim != 3:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be one PIL image: pass (channels, height, width), each "
            f"image of a batch by itself."
        )
    _check_shape(tensor)
    return pixels_to_pil(to_pixels(tensor).cpu())


def pil_to_pixels(image: Image) -> Tensor:
    """Return a PIL image's values as a uint8 tensor of shape `(channels, height, width)`."""
    # Band by band, here and below: PIL takes images apart faster than a tensor's dims are put in another order.
    values = bytearray().join(band.tobytes() for band in image.split())
    return torch.frombuffer(values, dtype=torch.uint8).view(-1, image.height, image.width)


def pixels_to_pil(pixels: Tensor) -> Image:
    """Return the PIL image of a uint8 tensor of shape `(channels, height, width)`."""
    channels, height, width = pixels.shape
    bands = [frombytes("L", (width, height), band.numpy().tobytes()) for band in pixels]
    return bands[0] if channels == 1 else merge(_MODES[channels], bands)


def _lifted(f_pil: Callable[[Image], Image], pixels: Tensor) -> Tensor:
    return pil_to_pixels(f_pil(pixels_to_pil(pixels)))


def _check_shape(image: Tensor) -> None:
    if image.ndim not in (3, 4) or image.shape[-3] not in _MODES:
        raise ValueError(
            f"a tensor of shape {tuple(image.shape)} is no image: pass (channels, height, width), or a batch of those, "
            f"with one or three channels."
        )
