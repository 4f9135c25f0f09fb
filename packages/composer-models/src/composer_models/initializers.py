"""Initializations of a model's weights, selected by name."""

import math
from collections.abc import Callable

import torch
from torch import nn

from composer_time import StringEnum

__all__ = ["Initializer"]


class Initializer(StringEnum):
    """Initialization of one kind of layer, for `torch.nn.Module.apply`.

    | member | effect |
    |---|---|
    | `KAIMING_NORMAL`, `KAIMING_UNIFORM`, `XAVIER_NORMAL`, `XAVIER_UNIFORM` | weights of `Linear` and `Conv2d` |
    | `BN_ONES`, `BN_UNIFORM` | `BatchNorm2d`: weights 1, or uniform in [0, 1); biases 0 |
    | `LINEAR_LOG_CONSTANT_BIAS` | biases of `Linear` with `-log(out_features)` |

    The last is for binary cross entropy: the initial probability of every class is near `1 / out_features`.

    Example:
        >>> head = torch.nn.Linear(8, 4)
        >>> _ = head.apply(Initializer("linear_log_constant_bias").get_initializer())
        >>> bool((head.bias.exp() == 0.25).all())
        True
    """

    KAIMING_NORMAL = "kaiming_normal"
    KAIMING_UNIFORM = "kaiming_uniform"
    BN_UNIFORM = "bn_uniform"
    BN_ONES = "bn_ones"
    XAVIER_UNIFORM = "xavier_uniform"
    XAVIER_NORMAL = "xavier_normal"
    LINEAR_LOG_CONSTANT_BIAS = "linear_log_constant_bias"

    def get_initializer(self) -> Callable[[nn.Module], None]:
        """Return a function that initializes a single module and ignores other kinds of modules.

        Returns:
            A function for `model.apply`.
        """
        return _INITIALIZERS[self]


def _weights(fill: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            fill(module.weight)

    return initialize


def _batch_norm(fill: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            fill(module.weight)
            nn.init.zeros_(module.bias)

    return initialize


def _log_constant_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        # sigmoid(-log(n)) is 1 / (n + 1).
        nn.init.constant_(module.bias, -math.log(module.out_features))


_INITIALIZERS: dict[Initializer, Callable[[nn.Module], None]] = {
    Initializer.KAIMING_NORMAL: _weights(nn.init.kaiming_normal_),
    Initializer.KAIMING_UNIFORM: _weights(nn.init.kaiming_uniform_),
    Initializer.BN_UNIFORM: _batch_norm(nn.init.uniform_),
    Initializer.BN_ONES: _batch_norm(nn.init.ones_),
    Initializer.XAVIER_UNIFORM: _weights(nn.init.xavier_uniform_),
    Initializer.XAVIER_NORMAL: _weights(nn.init.xavier_normal_),
    Initializer.LINEAR_LOG_CONSTANT_BIAS: _log_constant_bias,
}
