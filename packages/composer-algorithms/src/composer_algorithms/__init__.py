"""Published speed-up methods for training, each as a function for your own loop and as an Algorithm for an Engine.

The functions are in `composer_algorithms.functional`; each method's module (`composer_algorithms.mixup`) has both
forms and the `METADATA` that the table of methods is made from.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_algorithms.ema import EMA as EMA
    from composer_algorithms.label_smoothing import LabelSmoothing as LabelSmoothing
    from composer_algorithms.metadata import Metadata as Metadata
    from composer_algorithms.metadata import all_metadata as all_metadata
    from composer_algorithms.mixup import MixUp as MixUp

    __version__: str

# The methods need torch, so each loads on first use.
_HOME = {
    "EMA": "ema",
    "LabelSmoothing": "label_smoothing",
    "MixUp": "mixup",
    "Metadata": "metadata",
    "all_metadata": "metadata",
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]  # the names are those of the TYPE_CHECKING block above
    *_HOME,
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # reading the metadata costs more than the rest of this import

        value: object = version("composer-algorithms")
    elif name in _HOME:
        value = getattr(import_module(f"composer_algorithms.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
