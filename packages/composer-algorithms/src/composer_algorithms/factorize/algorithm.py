"""Factorization as a function on a model and as an Algorithm."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from composer_algorithms._arguments import check_interval, check_is_module
from composer_algorithms._method import ModelSurgery, report
from composer_algorithms.factorize.core import FactorizedConv2d, FactorizedLinear, factorizing_could_speedup
from composer_algorithms.module_surgery import count_module_instances, replace_module_classes

if TYPE_CHECKING:
    from composer_events.event import Event
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = [
    "Factorize",
    "apply_factorization",
    "LOG_NUM_CONV2D_REPLACEMENTS_KEY",
    "LOG_NUM_LINEAR_REPLACEMENTS_KEY",
]

LOG_NUM_CONV2D_REPLACEMENTS_KEY = "factorize/num_conv2d_replacements"
LOG_NUM_LINEAR_REPLACEMENTS_KEY = "factorize/num_linear_replacements"

_log = logging.getLogger("composer.algorithms.factorize")


def apply_factorization(
    model: nn.Module,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: int | float = 0.25,
    min_features: int = 512,
    latent_features: int | float = 0.25,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> None:
    """Replace each large convolution and linear layer in a model with two smaller ones.

    The new weights are the best approximation of the old ones. Not replaced are layers that would not do less work,
    grouped convolutions, subclasses with a `forward` of their own, layers whose weight is shared with another module or
    parametrized, and the output of `torch.nn.MultiheadAttention`, which is not called as a module. A second call with
    the same arguments changes nothing.

    Args:
        model: Changed in place.
        factorize_convs: Replace each large enough `torch.nn.Conv2d` with a `FactorizedConv2d`.
        factorize_linears: Replace each large enough `torch.nn.Linear` with a `FactorizedLinear`.
        min_channels: Minimum number of input and output channels of replaced convolutions.
        latent_channels: Latent channels, or below 1 a fraction of the smaller of input and output.
        min_features: Minimum number of input and output features of replaced linear layers.
        latent_features: Latent features, or below 1 a fraction of the smaller of input and output.
        optimizers: Existing optimizers of the model, which get the new parameters.

    Raises:
        ValueError: If a latent size is not above 0.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())
        >>> apply_factorization(model, latent_features=64)
        >>> model[0].latent_features
        64

    Reference:
        Zhang et al., "Accelerating Very Deep Convolutional Networks for Classification and Detection", TPAMI 2016,
        arXiv:1505.06798; Jaderberg et al., 2014, arXiv:1405.3866.
    """
    check_is_module(model, "layers to factorize")
    check_interval("[-inf, inf]", min_channels=min_channels, min_features=min_features)
    check_interval("(0, inf)", latent_channels=latent_channels, latent_features=latent_features)
    # Counted before any replacement: a shared weight has to stay one tensor, which no two factors can be.
    uses = Counter(id(tensor) for module in model.modules() for tensor in module.parameters(recurse=False))

    def can_be_replaced(module: nn.Conv2d | nn.Linear, kind: type[nn.Module], latent_size: int | float) -> bool:
        is_plain = type(module).forward is kind.forward and uses[id(module.weight)] == 1
        return is_plain and factorizing_could_speedup(module, latent_size)

    def factorize_conv(module: nn.Conv2d, module_index: int) -> nn.Module | None:
        is_large = min(module.in_channels, module.out_channels) >= min_channels
        if is_large and can_be_replaced(module, nn.Conv2d, latent_channels):
            return FactorizedConv2d.from_conv2d(module, module_index, latent_channels)
        return None

    def factorize_linear(module: nn.Linear, module_index: int) -> nn.Module | None:
        if isinstance(module, NonDynamicallyQuantizableLinear):  # MultiheadAttention reads the weight of its output
            return None
        is_large = min(module.in_features, module.out_features) >= min_features
        if is_large and can_be_replaced(module, nn.Linear, latent_features):
            return FactorizedLinear.from_linear(module, module_index, latent_features)
        return None

    if factorize_convs:
        replace_module_classes(model, {nn.Conv2d: factorize_conv}, optimizers)
    if factorize_linears:
        replace_module_classes(model, {nn.Linear: factorize_linear}, optimizers)
    if not count_module_instances(model, (FactorizedConv2d, FactorizedLinear)):
        _log.warning(
            "Factorize has no effect on this %s: below it there is no Conv2d of min_channels=%r and no Linear of "
            "min_features=%r or more that would do less work with latent_channels=%r and latent_features=%r.",
            *(type(model).__qualname__, min_channels, min_features, latent_channels, latent_features),
        )


class Factorize(ModelSurgery):
    """Replace each large convolution and linear layer in `state.model` with two smaller ones on `INIT`.

    The optimizers' parameter groups are updated. It acts before algorithms that wrap modules. Loading a checkpoint of
    the changed model applies the algorithm.

    Args:
        factorize_convs: Replace each large enough `torch.nn.Conv2d`.
        factorize_linears: Replace each large enough `torch.nn.Linear`.
        min_channels: Minimum number of input and output channels of replaced convolutions.
        latent_channels: Latent channels, or below 1 a fraction of the smaller of input and output.
        min_features: Minimum number of input and output features of replaced linear layers.
        latent_features: Latent features, or below 1 a fraction of the smaller of input and output.

    Raises:
        ValueError: If a latent size is not above 0.

    Example:
        >>> Factorize(factorize_convs=False).latent_features
        128

    Reference:
        Zhang et al., "Accelerating Very Deep Convolutional Networks for Classification and Detection", TPAMI 2016,
        arXiv:1505.06798. The paper fits the factors to responses on data; here they are fitted to the weights, and to
        data only in `FactorizedConv2d.set_rank` and `FactorizedLinear.set_rank`.
    """

    surgery_rank = 1  # before wrappers of modules

    # These defaults differ from those of the function, as in Composer.
    def __init__(
        self,
        factorize_convs: bool = True,
        factorize_linears: bool = True,
        min_channels: int = 256,
        latent_channels: int | float = 0.25,
        min_features: int = 256,
        latent_features: int | float = 128,
    ) -> None:
        check_interval("[-inf, inf]", min_channels=min_channels, min_features=min_features)
        check_interval("(0, inf)", latent_channels=latent_channels, latent_features=latent_features)
        self.factorize_convs = factorize_convs
        self.factorize_linears = factorize_linears
        self.min_channels = min_channels
        self.latent_channels = latent_channels
        self.min_features = min_features
        self.latent_features = latent_features

    def apply(self, event: "Event", state: "State", logger: "Logger | None") -> None:
        """Replace the layers, and log the number of factorized layers of each enabled kind."""
        apply_factorization(
            state.model,
            factorize_convs=self.factorize_convs,
            factorize_linears=self.factorize_linears,
            min_channels=self.min_channels,
            latent_channels=self.latent_channels,
            min_features=self.min_features,
            latent_features=self.latent_features,
            optimizers=state.optimizers,
        )
        for is_enabled, key, layer in (
            (self.factorize_convs, LOG_NUM_CONV2D_REPLACEMENTS_KEY, FactorizedConv2d),
            (self.factorize_linears, LOG_NUM_LINEAR_REPLACEMENTS_KEY, FactorizedLinear),
        ):
            if is_enabled:
                report(_log, logger, {key: count_module_instances(state.model, layer)})
