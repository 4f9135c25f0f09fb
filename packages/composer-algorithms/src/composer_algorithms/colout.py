"""ColOut: drop some rows and columns of images."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from PIL.Image import Image
from torch import Tensor

from composer_algorithms._arguments import check_interval
from composer_algorithms._draws import ResumableDraws
from composer_algorithms._method import NamedArguments
from composer_algorithms._tensors import batch_tensor, image_size, is_pil
from composer_algorithms.dataset_transforms import TransformedDatasets
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State

__all__ = ["ColOut", "ColOutTransform", "colout_batch", "METADATA"]

METADATA = METHODS["colout"]

ResizeTarget = bool | Literal["auto"]


def colout_batch(
    sample: Tensor | Image | tuple[Any, Any] | None = None,
    p_row: float = 0.15,
    p_col: float = 0.15,
    resize_target: ResizeTarget | str = "auto",
    *,
    generator: torch.Generator | None = None,
) -> Any:
    """Drop random rows and columns of an image, or the same ones of all images in a batch.

    `int((1 - p_row) * height)` rows and `int((1 - p_col) * width)` columns remain, in their order. The sample is not
    changed.

    Args:
        sample: An image or a batch of images as a tensor `(..., height, width)`, or a PIL image; or a pair of such an
            input and a target. If omitted, the function returns a transform for a dataset.
        p_row: Fraction of rows to drop, in [0, 1].
        p_col: Fraction of columns to drop, in [0, 1].
        resize_target: Whether the target loses the same rows and columns; `'auto'`: if it has the height and width of
            the input.
        generator: CPU generator of the random numbers. PyTorch's default generator when `None`.

    Returns:
        The smaller input, in the type of the input; a pair with the smaller target if the target was resized.

    Raises:
        ValueError: If a probability is outside [0, 1], the sample is a tuple without exactly two parts,
            `resize_target` has another value, or the target lacks the height and width of the input.
        TypeError: If the input is neither a tensor nor a PIL image.

    Example:
        >>> colout_batch(torch.rand(8, 3, 20, 20), p_row=0.25, p_col=0.5).shape
        torch.Size([8, 3, 15, 10])
    """
    if sample is None:
        return ColOutTransform(p_row, p_col, resize_target)
    check_interval("[0, 1]", p_row=p_row, p_col=p_col)
    if isinstance(sample, tuple) and len(sample) != 2:
        raise ValueError(f"sample is a tuple of {len(sample)} parts: pass an image, or a pair of image and target.")
    pair: Any = sample if isinstance(sample, tuple) else (sample, None)
    input, target = pair
    height, width = image_size(input)
    _check_resize_target(resize_target)
    if isinstance(resize_target, bool):
        resizes = resize_target and target is not None
    else:
        is_image = is_pil(target) or (isinstance(target, Tensor) and target.ndim > 2)
        resizes = is_image and image_size(target) == (height, width)
    rows = _kept(height, p_row, generator)
    columns = _kept(width, p_col, generator)
    if not resizes:
        return _selected(input, rows, columns)
    if image_size(target) != (height, width):
        raise ValueError(
            f"resize_target={resize_target!r} needs a target of the input's height and width, {height} x {width}, and "
            f"this one has {' x '.join(map(str, image_size(target)))}: pass resize_target=False."
        )
    return _selected(input, rows, columns), _selected(target, rows, columns)


class ColOutTransform(NamedArguments):
    """Dataset transform that applies `colout_batch`.

    It takes the same arguments as `colout_batch`, without the sample.

    Example:
        >>> ColOutTransform(p_row=0.5, p_col=0.5)(torch.rand(3, 8, 8)).shape
        torch.Size([3, 4, 4])
    """

    def __init__(self, p_row: float = 0.15, p_col: float = 0.15, resize_target: ResizeTarget | str = "auto") -> None:
        check_interval("[0, 1]", p_row=p_row, p_col=p_col)
        _check_resize_target(resize_target)
        self.p_row = p_row
        self.p_col = p_col
        self.resize_target = resize_target

    def __call__(self, sample: Tensor | Image | tuple[Any, Any]) -> Any:
        """Return the smaller image, or image and target."""
        return colout_batch(sample, self.p_row, self.p_col, self.resize_target)


@dataclass(repr=False, eq=False)
class ColOut(ResumableDraws, TransformedDatasets):
    """Drop rows and columns of the images.

    With `batch=True` it acts on `AFTER_DATALOADER`: all images of a batch lose the same rows and columns, as do the
    targets if they are resized. With `batch=False` it acts on `FIT_START` and adds a `ColOutTransform` to the
    training dataset, so that each image loses rows and columns of its own, drawn from PyTorch's default generator in
    the process that loads the image.

    Args:
        p_row: Fraction of rows to drop, in [0, 1].
        p_col: Fraction of columns to drop, in [0, 1].
        batch: Whether to act on whole batches.
        resize_target: Whether targets lose the same rows and columns; `'auto'`: if they have the height and width of
            the inputs. Must not be `True` with `batch=False`.
        input_key: Index, key or `(getter, setter)` pair of the inputs in the batch.
        target_key: The same for the targets.

    Raises:
        ValueError: If a probability is outside [0, 1] or `resize_target` has another value.
        NotImplementedError: If targets are to be resized with `batch=False`.

    Example:
        >>> ColOut(p_row=0.1)
        ColOut(p_row=0.1, p_col=0.15, batch=True, resize_target='auto', input_key=0, target_key=1)
    """

    acts_on = frozenset({Event.FIT_START, Event.AFTER_DATALOADER})

    p_row: float = 0.15
    p_col: float = 0.15
    batch: bool = True
    resize_target: ResizeTarget | str = "auto"
    input_key: Any = 0
    target_key: Any = 1

    def __post_init__(self) -> None:
        super().__init__(ColOutTransform(self.p_row, self.p_col, resize_target=False))
        _check_resize_target(self.resize_target)
        if self.resize_target is True and not self.batch:
            raise NotImplementedError(
                "resize_target=True cannot be done with batch=False: a dataset's transform sees the image alone. Use "
                "batch=True, or resize_target='auto'."
            )
        # Only the event in use, so that the engine skips the algorithm at the other.
        self.acts_on = frozenset({Event.AFTER_DATALOADER if self.batch else Event.FIT_START})
        self.schedulable = ("p_row", "p_col") if self.batch else ()  # the dataset's transform has copies

    def match(self, event: Event, state: State) -> bool:
        """Return whether a batch has just been loaded, or training starts on a new dataset."""
        return event == Event.AFTER_DATALOADER if self.batch else super().match(event, state)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Drop rows and columns of the batch, or add the transform to the dataset."""
        if not self.batch:
            super().apply(event, state, logger)
            return
        input = batch_tensor(state, self.input_key, "input_key")
        generator = self.next_generator(state)
        if self.resize_target is False:
            state.batch_set_item(self.input_key, colout_batch(input, self.p_row, self.p_col, generator=generator))
            return
        target = batch_tensor(state, self.target_key, "target_key")
        result = colout_batch((input, target), self.p_row, self.p_col, self.resize_target, generator=generator)
        if isinstance(result, tuple):
            result, smaller_target = cast("tuple[Tensor, Tensor]", result)
            state.batch_set_item(self.target_key, smaller_target)
        state.batch_set_item(self.input_key, result)


def _kept(size: int, p: float, generator: torch.Generator | None) -> Tensor:
    permutation = torch.randperm(size, generator=generator)
    return permutation[: int((1 - p) * size)].sort().values


def _selected(image: Any, rows: Tensor, columns: Tensor) -> Any:
    if is_pil(image):
        from torchvision.transforms.v2 import functional  # slow to load, and tensors do not need it

        plain = image.convert("L") if image.mode == "1" else image
        smaller = _selected(functional.pil_to_tensor(plain), rows, columns)
        result = functional.to_pil_image(smaller, mode="L" if image.mode == "P" else plain.mode)
        if image.mode == "P":  # the palette indices were selected like any values
            result.putpalette(image.getpalette() or [])
        return result.convert("1") if image.mode == "1" else result
    rows, columns = (kept.to(image.device, non_blocking=True) for kept in (rows, columns))
    # One gather from the flattened image, instead of one copy for the rows and another one for the columns.
    places = (rows[:, None] * image.shape[-1] + columns).flatten()
    pixels = image.flatten(-2)
    return pixels.gather(-1, places.expand(*pixels.shape[:-1], -1)).unflatten(-1, (len(rows), len(columns)))


def _check_resize_target(resize_target: ResizeTarget | str) -> None:
    if not isinstance(resize_target, bool) and str(resize_target).lower() != "auto":
        raise ValueError(f"resize_target={resize_target!r} is unknown: pass True, False or 'auto'.")
