"""Squeeze-and-excitation: scale the channels of an image depending on the means of all channels."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import ModelSurgery, log_no_effect, report
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import count_module_instances, replace_module_classes
from composer_events import Event, Logger, State

__all__ = ["SqueezeExcite", "SqueezeExcite2d", "SqueezeExciteConv2d", "apply_squeeze_excite", "METADATA"]

METADATA = METHODS["squeeze_excite"]

_log = logging.getLogger("composer.algorithms.squeeze_excite")


class SqueezeExcite2d(nn.Module):
    """Module that scales each channel of an image by a factor in (0, 1) computed from the means of all channels.

    Args:
        num_features: Number of channels.
        latent_channels: Width of the hidden layer: a number of channels, or below 1 a fraction of `num_features`.

    Raises:
        ValueError: If `latent_channels` is not above 0.

    Example:
        >>> import torch
        >>> SqueezeExcite2d(16, latent_channels=0.25)(torch.rand(2, 16, 8, 8)).shape
        torch.Size([2, 16, 8, 8])

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507, section 3. As in the paper, but
        without biases.
    """

    def __init__(self, num_features: int, latent_channels: float = 0.125) -> None:
        super().__init__()
        check_interval("(0, inf)", latent_channels=latent_channels)
        # At least one, as a small fraction of few channels would round down to an empty layer.
        latent_channels = max(1, int(latent_channels if latent_channels >= 1 else latent_channels * num_features))
        self.latent_channels = latent_channels
        self.pool_and_mlp = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(num_features, latent_channels, bias=False),
            nn.ReLU(),
            nn.Linear(latent_channels, num_features, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input: Tensor) -> Tensor:
        """Scale a batch of images of shape `(batch, num_features, height, width)`."""
        return input * self.pool_and_mlp(input)[:, :, None, None]  # broadcast over height and width


class SqueezeExciteConv2d(nn.Module):
    """Convolution followed by a `SqueezeExcite2d`.

    Args:
        *args: Arguments of `torch.nn.Conv2d`.
        latent_channels: As in `SqueezeExcite2d`, where `num_features` are the output channels of the convolution.
        conv: Existing convolution to use instead of a new one.
        **kwargs: Keyword arguments of `torch.nn.Conv2d`.

    Example:
        >>> import torch
        >>> SqueezeExciteConv2d(3, 16, kernel_size=3)(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 16, 6, 6])

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507. The paper places the module
        at the end of each residual block.
    """

    def __init__(
        self, *args: Any, latent_channels: float = 0.125, conv: nn.Conv2d | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(*args, **kwargs) if conv is None else conv
        # A second surgery visits this convolution again and must not wrap it twice.
        self.conv._already_squeeze_excited = True  # pyright: ignore[reportArgumentType]  # a mark, not a submodule
        self.se = SqueezeExcite2d(self.conv.out_channels, latent_channels)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the convolution, then scale its output channels."""
        return self.se(self.conv(input))

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, latent_channels: float = 0.125) -> "SqueezeExciteConv2d":
        """Create the module from an existing convolution; `module_index` is not used."""
        return SqueezeExciteConv2d(conv=module, latent_channels=latent_channels)


def apply_squeeze_excite(
    model: nn.Module,
    latent_channels: float = 64,
    min_channels: int = 128,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> None:
    """Add a `SqueezeExcite2d` after each wide convolution of a model.

    The convolutions stay the same objects. A second call changes nothing.

    Args:
        model: Changed in place.
        latent_channels: Width of the hidden layers: a number of channels, or below 1 a fraction of the output channels.
        min_channels: Minimum number of both input and output channels of a convolution.
        optimizers: Existing optimizers of the model, which get the new parameters.

    Raises:
        ValueError: If `latent_channels` is not above 0.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(128, 128, 3), nn.ReLU())
        >>> apply_squeeze_excite(model)
        >>> type(model[0]).__name__
        'SqueezeExciteConv2d'

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507.
    """
    check_interval("(0, inf)", latent_channels=latent_channels)
    check_interval("[-inf, inf]", min_channels=min_channels)

    def excite(module: nn.Conv2d, module_index: int) -> SqueezeExciteConv2d | None:
        is_wide = min(module.in_channels, module.out_channels) >= min_channels
        if not is_wide or hasattr(module, "_already_squeeze_excited"):
            return None
        return SqueezeExciteConv2d.from_conv2d(module, module_index, latent_channels)

    replace_module_classes(model, {nn.Conv2d: excite}, optimizers)
    if not count_module_instances(model, SqueezeExciteConv2d):
        why = f"below it there is no Conv2d with at least {min_channels=} input and output channels"
        log_no_effect(_log, "SqueezeExcite", model, why)


class SqueezeExcite(ModelSurgery):
    """Add squeeze-and-excitation after wide convolutions.

    On `INIT` it applies `apply_squeeze_excite` to `state.model`. The new parameters join the optimizer groups of their
    convolutions. It acts after the algorithms that replace convolutions, and before those that change their weights.
    Loading a checkpoint of the changed model applies it.

    Args:
        latent_channels: Width of the hidden layers: a number of channels, or below 1 a fraction of the output channels.
        min_channels: Minimum number of both input and output channels of a convolution.

    Raises:
        ValueError: If `latent_channels` is not above 0.

    Example:
        >>> SqueezeExcite(min_channels=512)
        SqueezeExcite(latent_channels=64, min_channels=512)

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507. The paper scales the output of each
        residual block, and this that of each wide convolution.
    """

    surgery_rank = 3  # after algorithms that replace convolutions, before those that change their weights

    def __init__(self, latent_channels: float = 64, min_channels: int = 128) -> None:
        check_interval("(0, inf)", latent_channels=latent_channels)
        check_interval("[-inf, inf]", min_channels=min_channels)
        self.latent_channels = latent_channels
        self.min_channels = min_channels

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Change the model, and log its number of squeeze-and-excitation layers."""
        apply_squeeze_excite(state.model, self.latent_channels, self.min_channels, state.optimizers)
        count = count_module_instances(state.model, SqueezeExciteConv2d)
        report(_log, logger, {"squeeze_excite/num_squeeze_excite_layers": count})
