"""BlurPool as a function on a model and as an Algorithm."""

import functools
import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import ModelSurgery, report
from composer_algorithms.blurpool.layers import BlurConv2d, BlurMaxPool2d
from composer_algorithms.module_surgery import (
    ReplacementFunction,
    count_module_instances,
    replace_module_classes,
)
from composer_events.warnings import NoEffectWarning

if TYPE_CHECKING:
    from composer_events.event import Event
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["BlurPool", "apply_blurpool"]

_log = logging.getLogger("composer.algorithms.blurpool")


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> None:
    """Replace strided convolutions and max pooling in a model with layers that blur before downsampling.

    New convolutions have copies of the weights. A second call changes nothing.

    Args:
        model: Changed in place.
        replace_convs: Replace each `torch.nn.Conv2d` that has a stride above 1 with a `BlurConv2d`.
        replace_maxpools: Replace each `torch.nn.MaxPool2d` with a `BlurMaxPool2d`, unless it also returns indices.
        blur_first: Blur before the convolution; see `BlurConv2d`.
        min_channels: Keep convolutions with fewer input channels, such as the first one of most networks.
        optimizers: Existing optimizers of the model, which get the new parameters.

    Raises:
        ValueError: If a hook computes the weight of such a convolution, as with `torch.nn.utils.weight_norm`.

    Warns:
        NoEffectWarning: If the model has no such layers.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.MaxPool2d(2))
        >>> apply_blurpool(model)
        >>> [type(layer).__name__ for layer in model]
        ['BlurConv2d', 'BlurMaxPool2d']

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486.
    """
    check_interval("[-inf, inf]", min_channels=min_channels)
    policies: dict[type[nn.Module], ReplacementFunction] = {}
    if replace_maxpools:
        policies[nn.MaxPool2d] = _blurred_maxpool
    if replace_convs:
        policies[nn.Conv2d] = functools.partial(_blurred_conv, blur_first=blur_first, min_channels=min_channels)
    replace_module_classes(model, policies, optimizers)
    if not count_module_instances(model, (BlurConv2d, BlurMaxPool2d)):
        warnings.warn(
            f"BlurPool has no effect on this {type(model).__qualname__}: below it there is no MaxPool2d and no Conv2d "
            f"with a stride above 1 and min_channels={min_channels!r} or more input channels. Lower min_channels, or "
            f"leave BlurPool out.",
            NoEffectWarning,
            stacklevel=2,
        )


def _blurred_maxpool(module: nn.MaxPool2d, module_index: int) -> BlurMaxPool2d | None:
    if module.return_indices:  # a blurred value does not come from a single pixel
        return None
    return BlurMaxPool2d.from_maxpool2d(module, module_index)


def _blurred_conv(module: nn.Conv2d, module_index: int, blur_first: bool, min_channels: int) -> BlurConv2d | None:
    is_candidate = max(module.stride) > 1 and module.in_channels >= min_channels
    # With blur_first the convolution inside a BlurConv2d keeps its stride; the mark stops a second replacement.
    if not is_candidate or hasattr(module, "_already_blurpooled"):
        return None
    if module._parameters.get("weight") is None and not parametrize.is_parametrized(module, "weight"):
        raise ValueError(
            f"module={module!r} has a weight that a hook computes, which the blurring layer cannot keep: use the "
            f"parametrization instead, such as torch.nn.utils.parametrizations.weight_norm."
        )
    return BlurConv2d.from_conv2d(module, module_index, blur_first)


class BlurPool(ModelSurgery):
    """Replace strided convolutions and max pooling in `state.model` on `INIT`, so that they blur before downsampling.

    The optimizers' parameter groups are updated. It acts after algorithms that replace whole operators, and before
    those that wrap convolutions or change their weights. A checkpoint of the changed model loads only into a model with
    BlurPool, so loading one applies the algorithm automatically.

    Args:
        replace_convs: Replace each `torch.nn.Conv2d` that has a stride above 1.
        replace_maxpools: Replace each `torch.nn.MaxPool2d`.
        blur_first: Blur before the convolution. Blurring after it costs more and may be more accurate.
        min_channels: Keep convolutions with fewer input channels.

    Raises:
        ValueError: If neither convolutions nor max pooling are to be replaced.

    Example:
        >>> BlurPool(min_channels=32)
        BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=32)

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486. The paper blurs
        after the nonlinearity; here the blur is next to the convolution, so no other module has to be found.
    """

    surgery_rank = 2  # after replacements of whole operators, before wrappers of convolutions

    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
    ) -> None:
        check_interval("[-inf, inf]", min_channels=min_channels)
        if not (replace_convs or replace_maxpools):
            raise ValueError(
                "replace_convs=False and replace_maxpools=False leave nothing to replace: set one of them, or leave "
                "BlurPool out."
            )
        self.replace_convs = replace_convs
        self.replace_maxpools = replace_maxpools
        self.blur_first = blur_first
        self.min_channels = min_channels

    def apply(self, event: "Event", state: "State", logger: "Logger | None") -> None:
        """Replace the layers and log their numbers."""
        apply_blurpool(
            state.model,
            replace_convs=self.replace_convs,
            replace_maxpools=self.replace_maxpools,
            blur_first=self.blur_first,
            min_channels=self.min_channels,
            optimizers=state.optimizers,
        )
        counts = {
            "blurpool/num_blurpool_layers": count_module_instances(state.model, BlurMaxPool2d),
            "blurpool/num_blurconv_layers": count_module_instances(state.model, BlurConv2d),
        }
        report(_log, logger, counts)
