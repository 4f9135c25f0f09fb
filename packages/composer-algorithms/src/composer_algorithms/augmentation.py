"""Augmentation primitives: functions of a PIL image and a level from 0 to 10 that bounds the strength.

Strength and direction are drawn from PyTorch's default generator. With `u` uniform between 0.1 and the level, `u / 10`
of the maximal strength is applied.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from PIL import ImageEnhance, ImageOps
from PIL.Image import Image, Resampling, Transform, frombytes, merge
from torch import Tensor

from composer_algorithms._draws import draw_integer, draw_uniform
from composer_algorithms._tensors import from_pixels, is_pil, to_pixels

__all__ = ["AugmentationFunction", "augmentation_sets", "image_as_type", "map_pillow_function"]

AugmentationFunction: TypeAlias = Callable[[Image, float], Image]
"""Function of a PIL image and a level that returns another image."""


def autocontrast(pil_img: Image, level: float = 0.0) -> Image:
    """Stretch the values of each channel to the full range. The level is not used."""
    return ImageOps.autocontrast(pil_img)


def equalize(pil_img: Image, level: float = 0.0) -> Image:
    """Equalize the histogram of each channel. The level is not used."""
    return ImageOps.equalize(pil_img)


def posterize(pil_img: Image, level: float) -> Image:
    """Keep the upper four bits of each value, or up to four fewer."""
    return ImageOps.posterize(pil_img, 4 - _whole_part(level, 4))


def rotate(pil_img: Image, level: float) -> Image:
    """Rotate by up to 30 degrees."""
    return pil_img.rotate(_with_sign(_whole_part(level, 30)), resample=Resampling.BILINEAR)


def solarize(pil_img: Image, level: float) -> Image:
    """Invert values above a threshold of 256, or up to 256 less."""
    return ImageOps.solarize(pil_img, 256 - _whole_part(level, 256))


def shear_x(pil_img: Image, level: float) -> Image:
    """Shift rows by up to 0.3 of their distance from the top."""
    return _affine(pil_img, (1, _with_sign(_part(level, 0.3)), 0, 0, 1, 0))


def shear_y(pil_img: Image, level: float) -> Image:
    """Shift columns by up to 0.3 of their distance from the left."""
    return _affine(pil_img, (1, 0, 0, _with_sign(_part(level, 0.3)), 1, 0))


def translate_x(pil_img: Image, level: float) -> Image:
    """Shift the image horizontally by up to a third of its width."""
    return _moved(pil_img, _with_sign(_whole_part(level, pil_img.width / 3)), 0)


def translate_y(pil_img: Image, level: float) -> Image:
    """Shift the image vertically by up to a third of its height."""
    return _moved(pil_img, 0, _with_sign(_whole_part(level, pil_img.height / 3)))


def _factor(level: float, upper: float = 1.0) -> float:
    if draw_integer(0, 2):
        factor = draw_uniform(1.0, level)
    else:
        factor = draw_uniform(1.0 - 0.09 * level, 1.0)  # level 10 leaves a tenth
    return upper * factor if factor > 1 else factor


def _original_factor(level: float) -> float:
    return _part(level, 1.8) + 0.1


def _enhancement(name: str, draw: Callable[[float], float], doc: str) -> AugmentationFunction:
    kind = getattr(ImageEnhance, name.partition("_")[0].capitalize())

    def enhance(pil_img: Image, level: float) -> Image:
        return kind(pil_img).enhance(draw(level))

    enhance.__name__ = enhance.__qualname__ = name  # by which pickle finds it
    enhance.__doc__ = doc
    return enhance


color = _enhancement("color", _factor, "Increase or decrease the color saturation.")
contrast = _enhancement("contrast", _factor, "Increase or decrease the contrast.")
# Bright images saturate, so the upper half of the range is weaker than in the other primitives.
brightness = _enhancement("brightness", partial(_factor, upper=0.75), "Brighten or darken the image.")
sharpness = _enhancement("sharpness", _factor, "Sharpen or blur the image.")
# Factors of 0.1 to 1.9, as in the AugMix paper.
color_original = _enhancement("color_original", _original_factor, "Scale the color saturation by 0.1 to 1.9.")
contrast_original = _enhancement("contrast_original", _original_factor, "Scale the contrast by 0.1 to 1.9.")
brightness_original = _enhancement("brightness_original", _original_factor, "Scale the brightness by 0.1 to 1.9.")
sharpness_original = _enhancement("sharpness_original", _original_factor, "Scale the sharpness by 0.1 to 1.9.")

_SAFE: list[AugmentationFunction] = [
    *(autocontrast, equalize, posterize, rotate, solarize, shear_x, shear_y, translate_x, translate_y),
]

augmentation_sets: dict[str, list[AugmentationFunction]] = {
    "all": [*_SAFE, color, contrast, brightness, sharpness],
    # Without the corruptions of ImageNet-C and CIFAR-10-C.
    "safe": _SAFE,
    "original": [*_SAFE, color_original, contrast_original, brightness_original, sharpness_original],
}
"""Named sets of primitives."""


def _affine(pil_img: Image, matrix: tuple[float, ...]) -> Image:
    return pil_img.transform(pil_img.size, Transform.AFFINE, matrix, resample=Resampling.BILINEAR)


def _moved(pil_img: Image, x: float, y: float) -> Image:
    # Whole pixels need no interpolation: the same values in a twentieth of the time.
    return pil_img.transform(pil_img.size, Transform.AFFINE, (1, 0, x, 0, 1, y), resample=Resampling.NEAREST)


def _part(level: float, largest: float) -> float:
    return draw_uniform(0.1, level) * largest / 10


def _whole_part(level: float, largest: float) -> int:
    return int(_part(level, largest))


def _with_sign(strength: float) -> float:
    return -strength if draw_integer(0, 2) else strength


_PRIMITIVES = [function for functions in augmentation_sets.values() for function in functions]


def find_set(augmentation_set: str | Sequence[AugmentationFunction]) -> Sequence[AugmentationFunction]:
    """Return the set with a given name, or the given functions themselves."""
    return augmentation_sets[augmentation_set] if isinstance(augmentation_set, str) else augmentation_set


def check_mode(image: Image, functions: Sequence[AugmentationFunction]) -> None:
    """Validate that the PIL operations behind the primitives all support the mode of an image."""
    if image.mode not in ("L", "RGB") and any(function in _PRIMITIVES for function in functions):
        raise TypeError(
            f"a PIL image of mode {image.mode!r} cannot be augmented: convert it to 'RGB' or 'L' before, such as by "
            f"image.convert('RGB')."
        )


def change(image: Image, functions: Sequence[AugmentationFunction], depth: int, severity: float) -> Image:
    """Apply `depth` of the functions in sequence, drawn with replacement."""
    for _ in range(depth):
        image = functions[draw_integer(0, len(functions))](image, severity)
    return image


TImage = TypeVar("TImage", bound=Tensor | Image)

_MODES = {1: "L", 3: "RGB"}


def map_pillow_function(f_pil: Callable[[Image], Image], imgs: TImage) -> TImage:
    """Apply a function of PIL images to an image of any type.

    Args:
        f_pil: Takes and returns a PIL image.
        imgs: A PIL image, or a tensor of shape `(channels, height, width)` or `(batch, channels, height, width)` with
            one or three channels: uint8, or floating point in [0, 1], which is rounded to 256 values.

    Returns:
        The result in the type of the input, with its dtype, value range and device. The images of a batch are
        processed separately.

    Raises:
        TypeError: If the input is neither, or its dtype is not supported.
        ValueError: If a tensor has another shape.

    Example:
        >>> image = torch.tensor([[[0, 255]]], dtype=torch.uint8)
        >>> map_pillow_function(lambda pil_img: pil_img.rotate(180), image)
        tensor([[[255,   0]]], dtype=torch.uint8)
    """
    if is_pil(imgs):
        return cast("TImage", f_pil(imgs))
    if not isinstance(imgs, Tensor):
        raise TypeError(f"{type(imgs).__qualname__} is not an image: pass a tensor or a PIL image.")
    _check_shape(imgs)
    images = to_pixels(imgs.detach()).cpu()
    if len(images) == 0:  # torch.stack fails on an empty list
        return cast("TImage", imgs.clone())
    if images.ndim == 3:
        return cast("TImage", from_pixels(_lifted(f_pil, images), like=imgs))
    return cast("TImage", from_pixels(torch.stack([_lifted(f_pil, image) for image in images]), like=imgs))


def image_as_type(image: Tensor | Image, typ: type) -> Any:
    """Convert an image to a tensor or a PIL image.

    Args:
        image: A PIL image, or a tensor of shape `(channels, height, width)`.
        typ: `torch.Tensor` or `PIL.Image.Image`.

    Returns:
        The image itself, even a batch, if it has the type. Otherwise a float32 tensor in [0, 1] or a PIL image.

    Raises:
        TypeError: If the type is neither of the two.
        ValueError: If a tensor to be converted to a PIL image has another shape.
    """
    if typ not in (Tensor, Image):
        raise TypeError(f"typ={typ!r} is not a type of image: pass torch.Tensor or PIL.Image.Image.")
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
    """Return the values of a PIL image as a uint8 tensor of shape `(channels, height, width)`."""
    # Band by band, here and below: PIL splits images faster than a tensor is permuted.
    values = bytearray().join(band.tobytes() for band in image.split())
    return torch.frombuffer(values, dtype=torch.uint8).view(-1, image.height, image.width)


def pixels_to_pil(pixels: Tensor) -> Image:
    """Return a uint8 tensor of shape `(channels, height, width)` as a PIL image."""
    channels, height, width = pixels.shape
    bands = [frombytes("L", (width, height), band.numpy().tobytes()) for band in pixels]
    return bands[0] if channels == 1 else merge(_MODES[channels], bands)


def _lifted(f_pil: Callable[[Image], Image], pixels: Tensor) -> Tensor:
    return pil_to_pixels(f_pil(pixels_to_pil(pixels)))


def _check_shape(image: Tensor) -> None:
    if image.ndim not in (3, 4) or image.shape[-3] not in _MODES:
        raise ValueError(
            f"a tensor of shape {tuple(image.shape)} is not an image: pass (channels, height, width), or a batch of "
            f"those, with one or three channels."
        )
