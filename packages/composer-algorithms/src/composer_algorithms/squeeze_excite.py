"""Squeeze-and-excitation: channels that are scaled by what the whole image shows."""

import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_number
from composer_algorithms.metadata import Metadata
from composer_algorithms.module_surgery import InitSurgery, count_module_instances, replace_module_classes

if TYPE_CHECKING:
    from composer_events.event import Event
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["SqueezeExcite", "SqueezeExcite2d", "SqueezeExciteConv2d", "apply_squeeze_excite", "METADATA"]

METADATA = Metadata(
    name="Squeeze Excite",
    class_name="SqueezeExcite",
    functional="apply_squeeze_excite",
    tldr="Replaces eligible layers with Squeeze-Excite layers",
    attribution="Hu et al, 2017",
    link="https://arxiv.org/abs/1709.01507",
    domains=("cv",),
    summary=(
        "Scales each channel behind a convolution by a factor that a small network computes from the means of all "
        "channels, so that the network can turn channels up and down by what is in the image."
    ),
    use=(
        "Accuracy rises consistently, and inference is about 20% slower. Use latent_channels of 64 or more; for "
        "ImageNet min_channels=512 keeps the cost low. It puts in more blocks than the paper."
    ),
)

_log = logging.getLogger("composer.algorithms.squeeze_excite")


class SqueezeExcite2d(nn.Module):
    """Scale each channel of an image by a factor in (0, 1) that depends on the means of all channels.

    Args:
        num_features: The number of channels.
        latent_channels: Width of the hidden layer: a number of channels, or below 1 a share of `num_features`.

    Raises:
        ValueError: If `latent_channels` is not above 0.

    Example:
        >>> import torch
        >>> SqueezeExcite2d(16, latent_channels=0.25)(torch.rand(2, 16, 8, 8)).shape
        torch.Size([2, 16, 8, 8])

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507, section 3. As there, but without
        biases.
    """

    def __init__(self, num_features: int, latent_channels: float = 0.125) -> None:
        super().__init__()
        _check_latent_channels(latent_channels)
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
        return input * self.pool_and_mlp(input)[:, :, None, None]


class SqueezeExciteConv2d(nn.Module):
    """A convolution with a `SqueezeExcite2d` behind it.

    Args:
        *args: Of `torch.nn.Conv2d`.
        latent_channels: As in `SqueezeExcite2d`, of the convolution's output channels.
        conv: The convolution to use, instead of a new one.
        **kwargs: Of `torch.nn.Conv2d`.

    Example:
        >>> import torch
        >>> SqueezeExciteConv2d(3, 16, kernel_size=3)(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 16, 6, 6])

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507. The paper puts one at the end of
        each residual block.
    """

    def __init__(
        self, *args: Any, latent_channels: float = 0.125, conv: nn.Conv2d | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(*args, **kwargs) if conv is None else conv
        self.conv._already_squeeze_excited = True  # pyright: ignore[reportArgumentType]  # a mark, not a submodule
        self.se = SqueezeExcite2d(self.conv.out_channels, latent_channels)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve and scale a batch of images."""
        return self.se(self.conv(input))

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, latent_channels: float = 0.125) -> "SqueezeExciteConv2d":
        """Put a `SqueezeExcite2d` behind a convolution that exists; `module_index` is not used."""
        return SqueezeExciteConv2d(conv=module, latent_channels=latent_channels)


def apply_squeeze_excite(
    model: nn.Module,
    latent_channels: float = 64,
    min_channels: int = 128,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> None:
    """Put a `SqueezeExcite2d` behind the wide convolutions of a model.

    The convolutions stay the objects that they are. A second call changes nothing.

    Args:
        model: Changed in place.
        latent_channels: Width of the hidden layers: a number of channels, or below 1 a share of the output channels.
        min_channels: Only convolutions with at least so many input and output channels get one.
        optimizers: Those that train the model, if they exist already: they get the new parameters.

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
    _check_latent_channels(latent_channels)
    _check_min_channels(min_channels)
    policy = functools.partial(_excited_conv, latent_channels=latent_channels, min_channels=min_channels)
    replace_module_classes(model, {nn.Conv2d: policy}, optimizers)
    if not count_module_instances(model, SqueezeExciteConv2d):
        _log.warning(
            "SqueezeExcite has no effect on this %s: below it there is no Conv2d with at least min_channels=%r input "
            "and output channels.",
            type(model).__qualname__,
            min_channels,
        )


def _excited_conv(
    module: nn.Conv2d, module_index: int, latent_channels: float, min_channels: int
) -> SqueezeExciteConv2d | None:
    is_wide = min(module.in_channels, module.out_channels) >= min_channels
    if not is_wide or hasattr(module, "_already_squeeze_excited"):
        return None
    return SqueezeExciteConv2d.from_conv2d(module, module_index, latent_channels)


class SqueezeExcite(InitSurgery):
    """Put squeeze-and-excitation behind wide convolutions: on `INIT`, `state.model` is changed in place.

    The new parameters join the optimizers' groups of their convolutions. It acts after the algorithms that replace
    convolutions, and before those that change their weights. Loading a checkpoint of the changed model applies it.

    Args:
        latent_channels: Width of the hidden layers: a number of channels, or below 1 a share of the output channels.
        min_channels: Only convolutions with at least so many input and output channels get one.

    Raises:
        ValueError: If `latent_channels` is not above 0.

    Example:
        >>> SqueezeExcite(min_channels=512)
        SqueezeExcite(latent_channels=64, min_channels=512)

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507. The paper excites the output of each
        residual block, this each wide convolution.
    """

    surgery_rank = 3

    def __init__(self, latent_channels: float = 64, min_channels: int = 128) -> None:
        _check_latent_channels(latent_channels)
        _check_min_channels(min_channels)
        self.latent_channels = latent_channels
        self.min_channels = min_channels

    def apply(self, event: "Event", state: "State", logger: "Logger | None") -> None:
        """Change the model, and log how many layers it has now."""
        apply_squeeze_excite(state.model, self.latent_channels, self.min_channels, state.optimizers)
        count = count_module_instances(state.model, SqueezeExciteConv2d)
        _log.info("SqueezeExcite: %d convolutions are followed by squeeze-and-excitation.", count)
        if logger is not None:
            logger.log_hyperparameters({"squeeze_excite/num_squeeze_excite_layers": count})

    def __repr__(self) -> str:
        return f"SqueezeExcite(latent_channels={self.latent_channels!r}, min_channels={self.min_channels!r})"


def _check_latent_channels(latent_channels: float) -> None:
    check_number("latent_channels", latent_channels, "a number of channels, or a share between 0 and 1")
    if not 0 < latent_channels < math.inf:
        raise ValueError(
            f"latent_channels={latent_channels!r} leaves no hidden layer: pass a number of channels, or a share of the "
            f"output channels between 0 and 1."
        )


def _check_min_channels(min_channels: int) -> None:
    check_number("min_channels", min_channels, "a number of channels, such as 128")
