"""The single changes: functions of a PIL image and a level from 0 to 10, which bounds how strong the change is.

How strong it is, and in which direction, is drawn from PyTorch's default generator. With `u` from the uniform
distribution between 0.1 and the level, `u / 10` of a largest strength is applied.
"""

from collections.abc import Callable
from typing import TypeAlias

from PIL import ImageEnhance, ImageOps
from PIL.Image import Image, Resampling, Transform

from composer_algorithms._draws import draw_integer, draw_uniform

__all__ = [
    "AugmentationFunction",
    "augmentation_sets",
    "autocontrast",
    "brightness",
    "brightness_original",
    "color",
    "color_original",
    "contrast",
    "contrast_original",
    "equalize",
    "posterize",
    "rotate",
    "sharpness",
    "sharpness_original",
    "shear_x",
    "shear_y",
    "solarize",
    "translate_x",
    "translate_y",
]

AugmentationFunction: TypeAlias = Callable[[Image, float], Image]
"""Takes a PIL image and a level, and returns another image."""


def autocontrast(pil_img: Image, level: float = 0.0) -> Image:
    """Stretch each channel's values to the whole range, whatever the level."""
    return ImageOps.autocontrast(pil_img)


def equalize(pil_img: Image, level: float = 0.0) -> Image:
    """Make all values of a channel equally frequent, whatever the level."""
    return ImageOps.equalize(pil_img)


def posterize(pil_img: Image, level: float) -> Image:
    """Keep the upper bits of each value: four, and up to four less."""
    return ImageOps.posterize(pil_img, 4 - _whole_part(level, 4))


def rotate(pil_img: Image, level: float) -> Image:
    """Rotate by up to 30 degrees."""
    return pil_img.rotate(_with_sign(_whole_part(level, 30)), resample=Resampling.BILINEAR)


def solarize(pil_img: Image, level: float) -> Image:
    """Invert values above a threshold: 256, and up to 256 less."""
    return ImageOps.solarize(pil_img, 256 - _whole_part(level, 256))


def shear_x(pil_img: Image, level: float) -> Image:
    """Shift rows by up to 0.3 of their distance from the top."""
    return _affine(pil_img, (1, _with_sign(_part(level, 0.3)), 0, 0, 1, 0))


def shear_y(pil_img: Image, level: float) -> Image:
    """Shift columns by up to 0.3 of their distance from the left."""
    return _affine(pil_img, (1, 0, 0, _with_sign(_part(level, 0.3)), 1, 0))


def translate_x(pil_img: Image, level: float) -> Image:
    """Shift the image sideways by up to a third of its width."""
    return _moved(pil_img, _with_sign(_whole_part(level, pil_img.width / 3)), 0)


def translate_y(pil_img: Image, level: float) -> Image:
    """Shift the image up or down by up to a third of its height."""
    return _moved(pil_img, 0, _with_sign(_whole_part(level, pil_img.height / 3)))


def color(pil_img: Image, level: float) -> Image:
    """Make colours stronger or weaker."""
    return ImageEnhance.Color(pil_img).enhance(_factor(level))


def contrast(pil_img: Image, level: float) -> Image:
    """Make contrast stronger or weaker."""
    return ImageEnhance.Contrast(pil_img).enhance(_factor(level))


def brightness(pil_img: Image, level: float) -> Image:
    """Make the image brighter, by less than the other factors, or darker."""
    factor = _factor(level)
    return ImageEnhance.Brightness(pil_img).enhance(0.75 * factor if factor > 1 else factor)


def sharpness(pil_img: Image, level: float) -> Image:
    """Sharpen or blur."""
    return ImageEnhance.Sharpness(pil_img).enhance(_factor(level))


def color_original(pil_img: Image, level: float) -> Image:
    """Scale the strength of colours by 0.1 to 1.9, as the paper of AugMix does."""
    return ImageEnhance.Color(pil_img).enhance(_original_factor(level))


def contrast_original(pil_img: Image, level: float) -> Image:
    """Scale contrast by 0.1 to 1.9, as the paper of AugMix does."""
    return ImageEnhance.Contrast(pil_img).enhance(_original_factor(level))


def brightness_original(pil_img: Image, level: float) -> Image:
    """Scale brightness by 0.1 to 1.9, as the paper of AugMix does."""
    return ImageEnhance.Brightness(pil_img).enhance(_original_factor(level))


def sharpness_original(pil_img: Image, level: float) -> Image:
    """Scale sharpness by 0.1 to 1.9, as the paper of AugMix does."""
    return ImageEnhance.Sharpness(pil_img).enhance(_original_factor(level))


_SAFE: list[AugmentationFunction] = [
    *(autocontrast, equalize, posterize, rotate, solarize, shear_x, shear_y, translate_x, translate_y),
]

augmentation_sets: dict[str, list[AugmentationFunction]] = {
    "all": [*_SAFE, color, contrast, brightness, sharpness],
    # Nothing in here is among the corruptions of ImageNet-C and CIFAR-10-C.
    "safe": _SAFE,
    "original": [*_SAFE, color_original, contrast_original, brightness_original, sharpness_original],
}
"""Sets of primitives to choose from, by name."""


def _affine(pil_img: Image, matrix: tuple[float, ...]) -> Image:
    return pil_img.transform(pil_img.size, Transform.AFFINE, matrix, resample=Resampling.BILINEAR)


def _moved(pil_img: Image, x: float, y: float) -> Image:
    # By whole pixels, so that there is nothing to interpolate: the same values in a twentieth of the time.
    return pil_img.transform(pil_img.size, Transform.AFFINE, (1, 0, x, 0, 1, y), resample=Resampling.NEAREST)


def _part(level: float, largest: float) -> float:
    return draw_uniform(0.1, level) * largest / 10


def _whole_part(level: float, largest: float) -> int:
    return int(_part(level, largest))


def _with_sign(strength: float) -> float:
    return -strength if draw_integer(0, 2) else strength


def _factor(level: float) -> float:
    if draw_integer(0, 2):
        return draw_uniform(1.0, level)
    return draw_uniform(1.0 - 0.09 * level, 1.0)


def _original_factor(level: float) -> float:
    return _part(level, 1.8) + 0.1
