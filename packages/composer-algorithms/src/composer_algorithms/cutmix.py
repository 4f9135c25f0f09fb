"""CutMix: train on images with a box of another image, and on the targets of both; MixUp or CutMix, drawn at random."""

import math
from typing import Any

import torch
from torch import Tensor

from composer_algorithms._arguments import accept_legacy_arguments, check_interval, warn_deprecated
from composer_algorithms._draws import draw_beta, draw_integer, draw_uniform, generator_for
from composer_algorithms._pairs import DrawPer, PairMixing, check_pairs
from composer_algorithms.metadata import METHODS
from composer_algorithms.mixup import mixup_batch
from composer_models.targets import ensure_targets_one_hot

__all__ = ["CutMix", "MixUpOrCutMix", "cutmix", "cutmix_batch", "METADATA"]

METADATA = METHODS["cutmix"]

Box = tuple[int, int, int, int]
"""`(x1, y1, x2, y2)`: half-open ranges, x along the second to last dim and y along the last."""


def cutmix_batch(
    input: Tensor,
    target: Tensor,
    length: float | None = None,
    alpha: float = 1.0,
    bbox: Box | None = None,
    indices: Tensor | None = None,
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, float, Box]:
    """Fill a box in each image of a batch with the same box of another image of the batch.

    The box is the same for all images. Unless given, its sides are `length` times those of the image, or `sqrt(1 - w)`
    times with `w` drawn from `Beta(alpha, alpha)`; its center is drawn, and parts outside the image are cut off. The
    inputs are not changed.

    Args:
        input: Shape `(batch, ..., height, width)`, any dtype.
        target: Shape `(batch, ...)`; returned permuted, not mixed.
        length: Sides of the box as a fraction of those of the image, in [0, 1].
        alpha: 0 or more. 0 makes the box as large as the image, large values cut half of its area.
        bbox: Box `(x1, y1, x2, y2)`, x along the second to last dim and y along the last.
        indices: A permutation of `range(batch)`. Drawn when `None`.
        uniform_sampling: Draw the center from a range that extends beyond the image by half a box, so that all pixels
            are equally likely to be covered. Otherwise it is drawn from the pixels of the image, which favors the
            middle.
        generator: CPU generator of the random numbers. PyTorch's default generator when `None`.

    Returns:
        The mixed inputs, `target[indices]`, the fraction of each image's area that is still its own, and the box.

    Raises:
        TypeError: If `alpha` or `length` is not a number, or another argument is not a tensor.
        ValueError: If both `length` and `bbox` are given, `alpha` is negative, `length` or `bbox` does not fit an
            image, `input` has no images, or `input` and `target` differ in length.

    Example:
        >>> x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
        >>> mixed, permuted, own_area, box = cutmix_batch(x, y, bbox=(0, 0, 4, 4))
        >>> own_area
        0.75

    Reference:
        Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", ICCV 2019,
        arXiv:1905.04899, eq. (1) and (2).
    """
    check_pairs(input, target, indices)
    if input.ndim < 3:
        raise ValueError(
            f"input of shape {tuple(input.shape)} is not a batch of images: pass (batch, ..., height, width), such as "
            f"(batch, channels, height, width)."
        )
    if bbox is not None and length is not None:
        raise ValueError(f"bbox={bbox!r} and length={length!r} both define the size of the box: pass one of them.")
    height, width = input.shape[-2:]
    if bbox is None:
        if length is None:
            cutmix_lambda = _gen_cutmix_coef(alpha, generator)
            bbox = _rand_bbox(height, width, cutmix_lambda, uniform_sampling=uniform_sampling, generator=generator)
        else:
            check_interval("[0, 1]", length=length)
            cut_sides = (int(length * height), int(length * width))
            bbox = _draw_box((height, width), cut_sides, (None, None), uniform_sampling, generator)
    elif len(bbox) != 4 or not (0 <= bbox[0] <= bbox[2] <= height and 0 <= bbox[1] <= bbox[3] <= width):
        raise ValueError(
            f"bbox={bbox!r} does not lie in images of {height} x {width} pixels: pass (x1, y1, x2, y2) with "
            f"0 <= x1 <= x2 <= {height} along the height and 0 <= y1 <= y2 <= {width} along the width."
        )
    if indices is None:
        indices = _gen_indices(len(input), generator)
    x1, y1, x2, y2 = bbox
    mixed = input.clone()
    permutation = indices.to(input.device, non_blocking=True)
    # Slice before indexing, which then copies only the box.
    mixed[..., x1:x2, y1:y2] = input[..., x1:x2, y1:y2][permutation]
    return mixed, target[indices.to(target.device, non_blocking=True)], _adjust_lambda(input, bbox), bbox


def cutmix(
    input: Tensor,
    target: Tensor,
    alpha: float = 1.0,
    num_classes: int | None = None,
    n_classes: int | None = None,
    return_targets: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mix a batch with the interface of early Composer releases.

    Args:
        input: As for `cutmix_batch`.
        target: Class indices of shape `(batch,)`, or one value per class.
        alpha: As for `cutmix_batch`.
        num_classes: Number of classes, used only with `return_targets`.
        n_classes: Oldest name of `num_classes`.
        return_targets: Also return the mixed targets, with one value per class.

    Returns:
        The mixed inputs, or a pair with the mixed targets.

    Raises:
        ValueError: If mixed targets are requested for class indices without a number of classes.
    """
    warn_deprecated("cutmix is now called cutmix_batch, which also returns the other targets and weights.", 2)
    mixed, permuted, own_area, _ = cutmix_batch(input, target, alpha=alpha)
    if not return_targets:
        return mixed
    classes = num_classes or n_classes
    if target.ndim == 1 and classes is None:
        raise ValueError(
            "return_targets=True needs the number of classes: pass num_classes, or targets with one value for each "
            "class."
        )
    logits_like = input.new_empty(()).expand(len(input), classes) if target.ndim == 1 and classes else target
    one_hot, permuted_one_hot = (ensure_targets_one_hot(logits_like, labels) for labels in (target, permuted))
    return mixed, torch.lerp(permuted_one_hot, one_hot, own_area)


class CutMix(PairMixing):
    """Train each microbatch, or each batch, on images that contain a box of another one of its images.

    It acts on the same events as `MixUp`, and mixes targets or losses in the same ways, with a new permutation and box
    for each microbatch, or with `draw_per="batch"` for the whole batch. Targets that have the height and width of the
    inputs get the box of the other image's target; they need `interpolate_loss=False`.

    Args:
        alpha: 0 or more; see `cutmix_batch`.
        interpolate_loss: Mix the losses instead of the targets.
        uniform_sampling: See `cutmix_batch`.
        input_key: Index, key or `(getter, setter)` pair of the inputs in the batch.
        target_key: The same for the targets.
        draw_per: `'microbatch'` or `'batch'`. With `'batch'`, microbatches must keep the order of the batch.

    Raises:
        TypeError: If `alpha` is not a number.
        ValueError: If `alpha` is negative or `draw_per` is anything else.

    Example:
        >>> CutMix(alpha=0.5).uniform_sampling
        False

    Reference:
        Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", ICCV 2019,
        arXiv:1905.04899.
    """

    schedulable = ("alpha",)

    @accept_legacy_arguments("CutMix", ignored=("num_classes",))
    def __init__(
        self,
        alpha: float = 1.0,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
        *,
        draw_per: DrawPer = "microbatch",
    ) -> None:
        check_interval("[0, inf)", alpha=alpha)
        super().__init__(interpolate_loss, input_key, target_key, draw_per)
        self.alpha = alpha
        self.uniform_sampling = uniform_sampling
        self._bbox: Box = (0, 0, 0, 0)
        self._adjusted_lambda = 1.0  # fraction of each image that is its own
        self._image_size: tuple[int, ...] = ()

    def _mix(self, input: Tensor, target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
        self._image_size = tuple(input.shape[-2:])
        if self.interpolate_loss and self._is_spatial(target):
            raise ValueError(
                f"interpolate_loss=True cannot mix targets of shape {tuple(target.shape)}, which have a value for each "
                f"pixel: the weights of the two losses would have to differ from pixel to pixel. Use "
                f"interpolate_loss=False."
            )
        mixed, permuted, self._adjusted_lambda, self._bbox = cutmix_batch(
            input,
            target,
            alpha=self.alpha,
            indices=self._indices,
            uniform_sampling=self.uniform_sampling,
            generator=generator,
        )
        return mixed, permuted, self._adjusted_lambda

    def smooth(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mixture of the targets and those of the other images."""
        if not self._is_spatial(target):
            return super().smooth(outputs, target)
        x1, y1, x2, y2 = self._bbox
        mixed = target.clone()
        mixed[..., x1:x2, y1:y2] = self._permuted_target[..., x1:x2, y1:y2]
        return mixed

    def _is_spatial(self, target: Tensor) -> bool:
        return target.ndim > 2 and tuple(target.shape[-2:]) == self._image_size


class MixUpOrCutMix(CutMix):
    """Train each microbatch, or each batch, with `CutMix` at the probability `switch_prob`, and with `MixUp` otherwise.

    It acts on the events of the two, and changes targets or losses as they do.

    Args:
        mixup_alpha: `alpha` of `MixUp`.
        cutmix_alpha: `alpha` of `CutMix`.
        switch_prob: Probability of `CutMix`, in [0, 1].
        interpolate_loss: Mix the losses instead of the targets.
        uniform_sampling: See `cutmix_batch`.
        input_key: Index, key or `(getter, setter)` pair of the inputs in the batch.
        target_key: The same for the targets.
        draw_per: `'microbatch'` or `'batch'`. With `'batch'`, microbatches must keep the order of the batch.

    Raises:
        TypeError: If a number is of another type.
        ValueError: If an alpha is negative, `switch_prob` is outside [0, 1] or `draw_per` is anything else.

    Example:
        >>> MixUpOrCutMix(switch_prob=0.25).switch_prob
        0.25

    Reference:
        Touvron et al., "Training data-efficient image transformers & distillation through attention", ICML 2021,
        arXiv:2012.12877. The arguments and their meaning are those of timm.
    """

    schedulable = ("mixup_alpha", "cutmix_alpha", "switch_prob")

    def __init__(
        self,
        mixup_alpha: float = 0.8,
        cutmix_alpha: float = 1.0,
        switch_prob: float = 0.5,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
        *,
        draw_per: DrawPer = "microbatch",
    ) -> None:
        check_interval("[0, inf)", mixup_alpha=mixup_alpha, cutmix_alpha=cutmix_alpha)
        check_interval("[0, 1]", switch_prob=switch_prob)
        super().__init__(cutmix_alpha, interpolate_loss, uniform_sampling, input_key, target_key, draw_per=draw_per)
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha
        self.switch_prob = switch_prob

    def _mix(self, input: Tensor, target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
        # From a generator of its own, so that both methods draw as they do alone.
        if draw_uniform(0, 1, generator_for(f"switch/{generator.initial_seed()}")) < self.switch_prob:
            self.alpha = self.cutmix_alpha  # which a schedule may have changed
            return super()._mix(input, target, generator)
        self._image_size = ()  # no target is spatial, so that `smooth` blends all of them
        mixed, permuted, mixing = mixup_batch(
            input, target, alpha=self.mixup_alpha, indices=self._indices, generator=generator
        )
        return mixed, permuted, 1 - mixing


# Names and leading arguments of the next four functions are those of Composer, whose users' tests call them.
def _gen_indices(num_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw the permutation that pairs the examples."""
    return torch.randperm(num_samples, generator=generator)


def _gen_cutmix_coef(alpha: float, generator: torch.Generator | None = None) -> float:
    """Draw the fraction of the area that is not cut."""
    check_interval("[0, inf)", alpha=alpha)
    return draw_beta(alpha, generator) if alpha > 0 else 0.0


def _rand_bbox(
    W: int,
    H: int,
    cutmix_lambda: float,
    cx: int | None = None,
    cy: int | None = None,
    uniform_sampling: bool = False,
    generator: torch.Generator | None = None,
) -> Box:
    """Draw a box that leaves the fraction `cutmix_lambda` of an image, or more if it extends beyond the edges.

    `W` is the size along x, the second to last dim, and `H` the size along y. The center is drawn unless given.
    """
    # Both sides are scaled, and the box has the area 1 - lambda.
    ratio = math.sqrt(1 - cutmix_lambda)
    return _draw_box((W, H), (int(ratio * W), int(ratio * H)), (cx, cy), uniform_sampling, generator)


def _adjust_lambda(input: Tensor, bbox: Box) -> float:
    """Return the fraction of the area outside the box."""
    x1, y1, x2, y2 = bbox
    height, width = input.shape[-2:]
    return 1 - (x2 - x1) * (y2 - y1) / (height * width)


def _draw_box(
    sides: tuple[int, int],
    cut_sides: tuple[int, int],
    center: tuple[int | None, int | None],
    uniform_sampling: bool,
    generator: torch.Generator | None,
) -> Box:
    edges: list[tuple[int, int]] = []
    for size, cut, middle in zip(sides, cut_sides, center, strict=True):
        if middle is None:
            beyond = cut // 2 if uniform_sampling else 0
            middle = draw_integer(-beyond, size + beyond, generator)
        # Clipped after the draw, so a box at the edge is smaller than the drawn size.
        edges.append((min(max(middle - cut // 2, 0), size), min(max(middle + cut // 2, 0), size)))
    (x1, x2), (y1, y2) = edges
    return x1, y1, x2, y2
