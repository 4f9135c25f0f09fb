"""Images of letters and digits, drawn from the TrueType fonts that come with matplotlib.

Nothing is downloaded. 16 fonts of the DejaVu and STIX families are there to train on, 6 of Computer Modern to test on:
the typefaces of the test are ones that no training image shows.
"""

import string
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

CHARACTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
CLASSES = string.ascii_lowercase + string.digits  # upper and lower case of a letter are one class
SIDE = 32

_WEIGHTS = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
    "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
}
TRAIN_FONTS = tuple(f"{family}{weight}.ttf" for family, weights in _WEIGHTS.items() for weight in weights)
TEST_FONTS = ("cmb10.ttf", "cmmi10.ttf", "cmr10.ttf", "cmss10.ttf", "cmti10.ttf", "cmtt10.ttf")
TRAIN_SIZES = (16, 20, 24)
TEST_SIZES = (18, 22)

# The images are one fixed data set; what differs between the runs of a comparison is drawn from their own seeds.
_DRAWS = {"train": 17, "test": 18}


def load_glyphs() -> tuple[TensorDataset, TensorDataset]:
    """Draw all images.

    Returns:
        2,976 images to train on and 744 to test on, as pairs of float32 `(1, 32, 32)`, of mean about 0, and class.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    return (
        TensorDataset(*draw_fonts(TRAIN_FONTS, TRAIN_SIZES, _DRAWS["train"])),
        TensorDataset(*draw_fonts(TEST_FONTS, TEST_SIZES, _DRAWS["test"])),
    )


@cache
def draw_fonts(fonts: tuple[str, ...], sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Draw every character in every font and size, each at a place of its own.

    Args:
        fonts: Names of files in matplotlib's folder of fonts.
        sizes: In pixels to the em.
        seed: Of the places.

    Returns:
        Images `(number, 1, 32, 32)`, and the index of each one's character in `CLASSES`.
    """
    folder = font_folder()
    from PIL import ImageFont  # it comes with matplotlib

    generator = np.random.default_rng(seed)
    images: list[np.ndarray] = []
    for font in fonts:
        for size in sizes:
            # The basic layout is the same wherever Pillow is; the other one needs a library that may be missing.
            face = ImageFont.truetype(str(folder / font), size, layout_engine=ImageFont.Layout.BASIC)
            images += [_draw(face, character, generator) for character in CHARACTERS]
    labels = [CLASSES.index(character.lower()) for character in CHARACTERS] * (len(fonts) * len(sizes))
    pixels = torch.from_numpy(np.stack(images)).float().unsqueeze(1) / 255
    return (pixels - 0.1) / 0.25, torch.tensor(labels)


def font_folder() -> Path:
    """Return where matplotlib keeps its TrueType fonts."""
    try:
        import matplotlib  # the only thing that needs it, so that the rest can be imported without
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "matplotlib is not installed, and the glyphs are drawn from the fonts inside it: pip install matplotlib "
            "(or 'composer-suite[profiler]', which asks for it)."
        ) from error
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def _draw(face: "FreeTypeFont", character: str, generator: np.random.Generator) -> np.ndarray:
    """Draw one character in white on black, with its box at a random place within the image."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = face.getbbox(character)
    x, y = (int(generator.integers(0, max(1, SIDE - int(extent) + 1))) for extent in (right - left, bottom - top))
    image = Image.new("L", (SIDE, SIDE))
    ImageDraw.Draw(image).text((x - left, y - top), character, font=face, fill=255)
    return np.asarray(image)
