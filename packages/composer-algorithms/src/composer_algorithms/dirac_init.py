"""Dirac initialization: convolutions that pass their inputs on at the start of training."""

from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from composer_algorithms._method import AppliedFunction, check_initialized, count_or_warn
from composer_algorithms.metadata import METHODS

__all__ = ["METADATA", "DiracInit", "apply_dirac_init"]

METADATA = METHODS["dirac_init"]


def apply_dirac_init(model: nn.Module) -> int:
    """Initialize the first filters of convolutions so that they copy the input channels.

    Of each convolution from `n` to `n` or more channels, with kernels larger than 1, the first `n` filters become the
    identity, and the others keep their weights. The first convolution of the model, grouped and parametrized ones are
    left as they are. Use it before training.

    Args:
        model: Changed in place.

    Returns:
        The number of convolutions with such filters.

    Raises:
        ValueError: If the weights are on the meta device.

    Warns:
        NoEffectWarning: If the model has no such convolution.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3, padding=1, bias=False))
        >>> apply_dirac_init(model)
        1
        >>> x = torch.rand(1, 4, 5, 5)
        >>> torch.equal(model[1](x)[:, :4], x)
        True

    Reference:
        Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498.
    """
    convs = [each for each in model.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    chosen = [
        conv
        for conv in convs[1:]
        if conv.groups == 1
        and conv.out_channels >= conv.in_channels
        and max(conv.kernel_size) > 1
        and not parametrize.is_parametrized(conv, "weight")
    ]
    for conv in chosen:
        check_initialized("DiracInit", conv.weight)
        nn.init.dirac_(conv.weight.data[: conv.in_channels])
    missing = "convolution after its first one with kernels larger than 1 and no more input than output channels"
    return count_or_warn("DiracInit", model, missing, len(chosen), "Use a network that has one")


@dataclass(repr=False, eq=False)
class DiracInit(AppliedFunction):
    """Initialize the first filters of convolutions so that they copy the input channels.

    On `INIT` it applies `apply_dirac_init` to `state.model`, before algorithms that replace convolutions. Weights of a
    checkpoint are loaded later, so a resumed run is not affected.

    Example:
        >>> DiracInit()
        DiracInit()

    Reference:
        See `apply_dirac_init`.
    """

    surgery_rank = 0
    function = staticmethod(apply_dirac_init)
    counted = "dirac_init/num_convolutions"
