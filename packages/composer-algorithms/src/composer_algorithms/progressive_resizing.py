"""Progressive resizing: train on small images first and increase their size during training."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_algorithms._arguments import check_choice, check_counts, check_interval
from composer_algorithms._draws import ResumableDraws, draw_integer
from composer_algorithms._method import Method, elapsed_fraction
from composer_algorithms._tensors import UnsupportedBatchError, batch_tensor, require_tensor
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State

__all__ = ["ProgressiveResizing", "resize_batch", "METADATA"]

METADATA = METHODS["progressive_resizing"]

Interpolation = Literal["nearest", "bilinear", "area"]


def resize_batch(
    input: Tensor,
    target: Tensor | None,
    scale_factor: float,
    mode: str = "resize",
    resize_targets: bool = False,
    *,
    interpolation: Interpolation = "nearest",
    antialias: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Make the images of a batch smaller.

    Args:
        input: Shape `(batch, channels, height, width)`; one or three spatial dims work as well.
        target: Used only with `resize_targets`.
        scale_factor: Ratio of the new height and width to the old ones, rounded down to whole pixels, at least one.
            With 1 or more, input and target are returned unchanged.
        mode: `'resize'` resamples the images, `'crop'` takes a random crop at the same position in all images.
        resize_targets: Also resize the targets: class indices `(batch, height, width)`, or values
            `(batch, classes, height, width)`.
        interpolation: Interpolation of the input for `'resize'`. Targets are always resampled with `'nearest'`, which
            does not create new classes.
        antialias: Whether `'bilinear'` applies an antialiasing filter.
        generator: CPU generator of the random numbers. PyTorch's default generator when `None`.

    Returns:
        The smaller inputs, and the targets, resized with `resize_targets`.

    Raises:
        TypeError: If `input` is not a tensor, `scale_factor` not a number, or the input to resample has an integer
            dtype other than uint8.
        ValueError: If `mode` or `interpolation` is unknown, `scale_factor` is 0 or less, or a tensor to resize has no
            spatial dims.

    Example:
        >>> smaller, target = resize_batch(torch.rand(2, 3, 8, 8), None, scale_factor=0.5)
        >>> smaller.shape
        torch.Size([2, 3, 4, 4])
    """
    _check_modes(mode, interpolation, antialias)
    require_tensor(input, "input")
    check_interval("(0, inf]", scale_factor=scale_factor)
    if scale_factor >= 1:
        return input, target
    sides = _sides(input, "input")
    size = [max(1, int(side * scale_factor)) for side in sides]
    # Pass the factor where possible: with the rounded size, interpolate would sample at slightly different positions.
    factor = scale_factor if min(sides) * scale_factor >= 1 else None
    if resize_targets and target is None:
        raise ValueError("resize_targets=True has no target to resize: pass one, or resize_targets=False.")
    smaller, smaller_target = _resized(
        input, target if resize_targets else None, size, factor, mode, interpolation, antialias, generator
    )
    return smaller, smaller_target if resize_targets else target


@dataclass(repr=False, eq=False)
class ProgressiveResizing(ResumableDraws, Method):
    """Increase the size of the training images during training.

    On `AFTER_DATALOADER` the inputs in `state.batch` are resized: to `initial_scale` of their height and width for the
    first `delay_fraction` of training, then growing linearly up to full size for the last `finetune_fraction`. Height
    and width are each rounded to a multiple of `size_increment`. It logs `progressive_resizing/height`, `/width` and
    `/scale_factor`, the latter before rounding.

    Args:
        mode: `'resize'` or `'crop'`; see `resize_batch`.
        initial_scale: Initial scale of height and width, in [0, 1].
        finetune_fraction: Fraction of training with full size, at its end.
        delay_fraction: Fraction of training with the initial size, at its beginning.
        size_increment: In pixels.
        resize_targets: Also resize the targets; see `resize_batch`.
        input_key: Index, key or `(getter, setter)` pair of the inputs in the batch.
        target_key: The same for the targets. Used only with `resize_targets`.
        interpolation: See `resize_batch`.
        antialias: See `resize_batch`.

    Raises:
        ValueError: If `mode` or `interpolation` is unknown, a fraction is outside [0, 1], `delay_fraction` and
            `finetune_fraction` add up to more than 1, or `size_increment` is less than 1.

    Example:
        >>> algorithm = ProgressiveResizing(delay_fraction=0.5, finetune_fraction=0.25)
        >>> algorithm.scale_factor(0.625)
        0.75
    """

    acts_on = frozenset({Event.AFTER_DATALOADER})

    mode: str = "resize"
    initial_scale: float = 0.5
    finetune_fraction: float = 0.2
    delay_fraction: float = 0.5
    size_increment: int = 4
    resize_targets: bool = False
    input_key: Any = 0
    target_key: Any = 1
    _: KW_ONLY
    interpolation: Interpolation = "nearest"
    antialias: bool = False

    def __post_init__(self) -> None:
        _check_modes(self.mode, self.interpolation, self.antialias)
        check_interval(
            "[0, 1]",
            initial_scale=self.initial_scale,
            finetune_fraction=self.finetune_fraction,
            delay_fraction=self.delay_fraction,
        )
        if self.delay_fraction + self.finetune_fraction > 1:
            raise ValueError(
                f"delay_fraction={self.delay_fraction!r} and finetune_fraction={self.finetune_fraction!r} add up to "
                f"more than 1: lower one of them."
            )
        check_counts(size_increment=self.size_increment)

    def scale_factor(self, elapsed: float) -> float:
        """Return the scale of height and width.

        Args:
            elapsed: Completed fraction of training, in [0, 1].
        """
        # 0 where the two fractions add up to 1: the size then jumps.
        growing = 1 - self.delay_fraction - self.finetune_fraction
        grown = 0.0
        if elapsed >= self.delay_fraction:
            grown = min((elapsed - self.delay_fraction) / growing, 1.0) if growing > 0 else 1.0
        return self.initial_scale + (1 - self.initial_scale) * grown

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Resize the inputs, and the targets with `resize_targets`, to the current size."""
        elapsed = elapsed_fraction(state, "ProgressiveResizing")
        input = batch_tensor(state, self.input_key, "input_key")
        scale = self.scale_factor(float(elapsed))
        sides = _sides(input, f"batch item input_key={self.input_key!r}")
        size = [self._rounded(side, scale) for side in sides]
        if size != sides:
            target = batch_tensor(state, self.target_key, "target_key") if self.resize_targets else None
            generator = self.next_generator(state) if self.mode == "crop" else None
            input, target = _resized(
                input, target, size, None, self.mode, self.interpolation, self.antialias, generator
            )
            state.batch_set_item(self.input_key, input)
            if target is not None:
                state.batch_set_item(self.target_key, target)
        if logger is not None:
            logger.log_metrics(
                {
                    "progressive_resizing/height": input.shape[2],
                    "progressive_resizing/width": input.shape[-1],  # the height with one spatial dim
                    "progressive_resizing/scale_factor": scale,
                }
            )

    def _rounded(self, side: int, scale: float) -> int:
        increment = self.size_increment  # also the smallest size, as rounding could give 0
        # At full scale, keep sides that are not a multiple of the increment.
        return min(side, max(increment, round(side * scale / increment) * increment)) if scale < 1 else side


def _resized(
    input: Tensor,
    target: Tensor | None,
    size: Sequence[int],
    factor: float | None,
    mode: str,
    interpolation: Interpolation,
    antialias: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    corner = None
    if mode == "crop":
        sides = input.shape[2:]
        corner = [draw_integer(0, side - new + 1, generator) for side, new in zip(sides, size, strict=True)]
        smaller = _crop(input, corner, size)
    else:
        smaller = _sample(input, size, factor, interpolation, antialias)
    return smaller, None if target is None else _smaller_target(target, input, size, factor, corner)


def _crop(tensor: Tensor, corner: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(corner, size, strict=True), start=2):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _sample(
    tensor: Tensor, size: Sequence[int], factor: float | None, interpolation: Interpolation, antialias: bool = False
) -> Tensor:
    if not (tensor.is_floating_point() or tensor.dtype == torch.uint8):
        raise UnsupportedBatchError(
            f"images of dtype {tensor.dtype} cannot be resampled: pass floating point or uint8, or mode='crop'."
        )
    mode: str = interpolation
    if interpolation == "bilinear":
        # interpolate has a different name for each number of spatial dims.
        mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    if factor is not None:
        return F.interpolate(tensor, scale_factor=factor, mode=mode, antialias=antialias)
    return F.interpolate(tensor, size=list(size), mode=mode, antialias=antialias)


def _smaller_target(
    target: Tensor, input: Tensor, size: Sequence[int], factor: float | None, corner: Sequence[int] | None
) -> Tensor:
    if target.ndim <= 2:
        raise ValueError(
            f"resize_targets=True needs targets with spatial dims; got the shape {tuple(target.shape)}: "
            f"pass (batch, height, width) or (batch, classes, height, width), or resize_targets=False."
        )
    are_indices = target.ndim == input.ndim - 1
    values = target.unsqueeze(1) if are_indices else target  # the class dim that interpolate expects
    # Targets may have another resolution than the images, so size and position are scaled.
    sides, own_sides = _sides(input, "input"), _sides(values, "target")
    ratios = [own / side for own, side in zip(own_sides, sides, strict=True)]
    own_size = [max(1, round(new * ratio)) for new, ratio in zip(size, ratios, strict=True)]
    if corner is not None:
        starts = [
            min(int(start * ratio), side - new)
            for start, ratio, side, new in zip(corner, ratios, own_sides, own_size, strict=True)
        ]
        smaller = _crop(values, starts, own_size)
    else:
        # interpolate does not support integer labels. float64 represents them exactly, and 'nearest' only copies.
        convertible = values if values.is_floating_point() else values.double()
        smaller = _sample(convertible, own_size, factor, "nearest").to(target.dtype)
    return smaller.squeeze(1) if are_indices else smaller


def _sides(tensor: Tensor, what: str) -> list[int]:
    if tensor.ndim <= 2:
        raise ValueError(
            f"{what} of shape {tuple(tensor.shape)} has no spatial dims to resize: pass (batch, channels, height, "
            f"width)."
        )
    return list(tensor.shape[2:])


def _check_modes(mode: str, interpolation: str, antialias: bool) -> None:
    check_choice(("crop", "resize"), mode=mode)
    check_choice(("nearest", "bilinear", "area"), interpolation=interpolation)
    if antialias and interpolation != "bilinear":
        raise ValueError(
            f"antialias=True requires interpolation='bilinear'; got {interpolation!r}. Choose that, or leave antialias "
            f"out."
        )
