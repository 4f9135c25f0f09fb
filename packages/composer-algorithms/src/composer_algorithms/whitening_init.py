"""Whitening initialization: a first convolution whose outputs are uncorrelated."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import AppliedFunction, check_initialized, count_or_warn
from composer_algorithms.metadata import METHODS

__all__ = ["METADATA", "WhiteningInit", "apply_whitening_init"]

METADATA = METHODS["whitening_init"]


def apply_whitening_init(model: nn.Module, images: Tensor, eps: float = 5e-4, freeze: bool = True) -> int:
    """Initialize the first convolution of a model so that it whitens the patches of images.

    Filter `i` is `e_i / sqrt(v_i + eps)`, where `v_i` are the eigenvalues of the covariance of the patches under the
    kernel, in descending order, and `e_i` the eigenvectors, whose largest component is positive. Of a patch with `n`
    numbers, the first `n` outputs therefore have the covariance 1 for `eps=0`, and the next `n` filters are the
    negatives of the first. Further filters keep their weights; with less than `n`, the first ones are used. The bias is
    0. Use it before training.

    Eigenvectors of equal eigenvalues are not unique, and any choice of them whitens as well, but rounding decides
    between them. Pass the same images on all ranks.

    Args:
        model: Changed in place.
        images: Shape `(batch, channels, height, width)`, as the model gets them. The airbench scripts use 5000.
        eps: Added to the eigenvalues, 0 or more, so that directions of little variance are not amplified.
        freeze: Whether the filters, but not the bias, stay as they are in training.

    Returns:
        The number of filters that were set.

    Raises:
        ValueError: If `eps` is negative, the images do not fit the convolution or have fewer patches than a patch has
            numbers, or the weights are on the meta device.

    Warns:
        NoEffectWarning: If the first convolution is not a plain `Conv2d`, or is missing.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 24, 2), nn.GELU())
        >>> apply_whitening_init(model, torch.rand(50, 3, 8, 8))
        24
        >>> model[0].weight.requires_grad, model[0].bias.requires_grad
        (False, True)

    Reference:
        Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498, section 3.2.
    """
    check_interval("[0, inf)", eps=eps)
    conv = next((each for each in model.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if not isinstance(conv, nn.Conv2d) or conv.groups > 1 or parametrize.is_parametrized(conv, "weight"):
        missing = "Conv2d without groups and parametrizations as its first convolution"
        return count_or_warn("WhiteningInit", model, missing, 0, "Use a network that has one")
    check_initialized("WhiteningInit", conv.weight)
    if images.ndim != 4 or images.shape[1] != conv.in_channels:
        raise ValueError(
            f"images of the shape {tuple(images.shape)} must be (batch, {conv.in_channels}, height, width), as the "
            f"first convolution gets them."
        )
    if any(side < kernel for side, kernel in zip(images.shape[2:], conv.kernel_size, strict=True)):
        raise ValueError(f"images of {tuple(images.shape[2:])} are smaller than the kernel, {conv.kernel_size}.")
    if not images.isfinite().all():
        raise ValueError("images have numbers that are NaN or infinite.")
    patches = F.unfold(images.detach().to("cpu", torch.float64), conv.kernel_size, conv.dilation)
    patches = patches.transpose(1, 2).flatten(0, 1)
    size = patches.shape[1]
    if len(patches) <= size:
        raise ValueError(f"images have {len(patches)} patches of {size} numbers; more than {size} are needed.")
    values, vectors = torch.linalg.eigh(patches.T.cov())
    vectors = vectors.flip(1).T
    # The first of the components that are largest up to rounding.
    largest = (vectors.abs() >= (1 - 1e-6) * vectors.abs().amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
    vectors = vectors * vectors.gather(1, largest).sign()
    filters = vectors / (values.flip(0).clamp(min=0)[:, None] + eps).sqrt()
    if values[0] + eps <= 1e-12 * values[-1]:  # up to rounding, nothing varies in this direction
        raise ValueError(
            f"eps={eps!r} is too small for these images, whose patches do not vary in some direction, as those of gray "
            f"images with three channels. Use a larger one, such as 5e-4."
        )
    filters = torch.cat([filters, -filters])[: conv.out_channels].unflatten(1, conv.weight.shape[1:])
    with torch.no_grad():
        conv.weight[: len(filters)] = filters.to(conv.weight)
        if conv.bias is not None:
            conv.bias.zero_()
    conv.weight.requires_grad_(not freeze)
    return len(filters)


@dataclass(repr=False, eq=False)
class WhiteningInit(AppliedFunction):
    """Initialize the first convolution of a model so that it whitens the patches of images.

    On `INIT` it applies `apply_whitening_init` to `state.model`, before algorithms that replace convolutions. Weights
    of a checkpoint are loaded later, so a resumed run has those of the first one, also with other images.

    Args:
        images: See `apply_whitening_init`. The same on all ranks.
        eps: Added to the eigenvalues, 0 or more.
        freeze: Whether the filters, but not the bias, stay as they are in training.

    Raises:
        ValueError: If `eps` is negative; on `INIT`, if the images do not fit the first convolution.

    Example:
        >>> WhiteningInit(torch.rand(50, 3, 8, 8))
        WhiteningInit(images=<50x3x8x8>, eps=0.0005, freeze=True)

    Reference:
        See `apply_whitening_init`.
    """

    surgery_rank = 0
    function = staticmethod(apply_whitening_init)
    counted = "whitening_init/num_filters"

    images: Tensor
    eps: float = 5e-4
    freeze: bool = True

    def __post_init__(self) -> None:
        check_interval("[0, inf)", eps=self.eps)

    def __repr__(self) -> str:
        size = "x".join(map(str, self.images.shape))
        return f"WhiteningInit(images=<{size}>, eps={self.eps!r}, freeze={self.freeze!r})"
