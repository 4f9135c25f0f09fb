"""Which primitives to choose from, and how strong they may be."""

from collections.abc import Sequence

from PIL.Image import Image

from composer_algorithms._draws import draw_integer
from composer_algorithms._numbers import check_number
from composer_algorithms.augmentation.primitives import AugmentationFunction, augmentation_sets

_PRIMITIVES = [function for functions in augmentation_sets.values() for function in functions]


def find_set(augmentation_set: str | Sequence[AugmentationFunction]) -> Sequence[AugmentationFunction]:
    """Return a set by its name, or the functions that were given as one.

    Raises:
        KeyError: If there is no set of that name.
        TypeError: If it is neither a name nor a list of functions.
        ValueError: If no functions were given.
    """
    if not isinstance(augmentation_set, str):
        if not isinstance(augmentation_set, Sequence) or not all(map(callable, augmentation_set)):
            raise TypeError(
                f"augmentation_set={augmentation_set!r} is neither a name nor a list of functions: choose one of "
                f"{', '.join(map(repr, augmentation_sets))}, or pass functions of an image and a level."
            )
        if not augmentation_set:
            raise ValueError("augmentation_set=[] has nothing to choose from: pass at least one function.")
        return augmentation_set
    if augmentation_set not in augmentation_sets:
        raise KeyError(
            f"augmentation_set={augmentation_set!r} is unknown: choose one of "
            f"{', '.join(map(repr, augmentation_sets))}, or pass a list of functions."
        )
    return augmentation_sets[augmentation_set]


def check_severity(severity: float) -> None:
    """Raise if a severity is no level."""
    check_number("severity", severity, "a level from 0 to 10")
    if not 0 <= severity <= 10:
        raise ValueError(f"severity={severity!r} is no level: pass a number from 0 to 10.")


def check_mode(image: Image, functions: Sequence[AugmentationFunction]) -> None:
    """Raise if an image is of a mode that PIL's own changes, which the primitives make, do not all know.

    Raises:
        TypeError: If it has other than one or three channels of eight bits.
    """
    if image.mode not in ("L", "RGB") and any(function in _PRIMITIVES for function in functions):
        raise TypeError(
            f"a PIL image of mode {image.mode!r} cannot be augmented: convert it to 'RGB' or 'L' before, such as by "
            f"image.convert('RGB')."
        )


def change(image: Image, functions: Sequence[AugmentationFunction], depth: int, severity: float) -> Image:
    """Apply `depth` of the functions, drawn with replacement, one after the other."""
    for _ in range(depth):
        image = functions[draw_integer(0, len(functions))](image, severity)
    return image
