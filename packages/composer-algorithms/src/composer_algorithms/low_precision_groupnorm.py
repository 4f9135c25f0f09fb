"""Low precision GroupNorm: normalize in the autocast dtype instead of float32."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._low_precision import LowPrecisionNorm, in_autocast_dtype, swap_norms
from composer_algorithms.metadata import METHODS
from composer_dist.devices import Precision
from composer_events import Event, Logger, State

__all__ = ["LPGroupNorm", "LowPrecisionGroupNorm", "apply_low_precision_groupnorm", "METADATA"]

METADATA = METHODS["low_precision_groupnorm"]


class LPGroupNorm(nn.GroupNorm):
    """A `torch.nn.GroupNorm` that computes in the dtype of the surrounding autocast.

    It takes the same arguments.

    Example:
        >>> import torch
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LPGroupNorm(2, 4)(torch.rand(2, 4)).dtype
        torch.bfloat16
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each group of channels in the autocast dtype."""

        def normalize(low: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return F.group_norm(low, self.num_groups, weight, bias, self.eps)

        return in_autocast_dtype(normalize, input, self.weight, self.bias)


def apply_low_precision_groupnorm(
    model: nn.Module,
    precision: Precision | str | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> nn.Module:
    """Convert the `torch.nn.GroupNorm` modules of a model to `LPGroupNorm`.

    Each one stays the same object with the same parameters. Subclasses with a `forward` of their own are not
    converted. A second call changes nothing.

    Args:
        model: Changed in place.
        precision: Training precision. Only `'amp_fp16'` and `'amp_bf16'` have an effect.
        optimizers: Existing optimizers of the model. No parameter is added or removed.

    Returns:
        The model.

    Warns:
        NoEffectWarning: If `precision` is any other, or the model has no `torch.nn.GroupNorm` to convert.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8))
        >>> type(apply_low_precision_groupnorm(model, "amp_bf16")[1]).__name__
        'LPGroupNorm'
    """
    return swap_norms(model, nn.GroupNorm, LPGroupNorm, precision, optimizers)


class LowPrecisionGroupNorm(LowPrecisionNorm):
    """Compute GroupNorm in low precision.

    On the event `apply_at` it applies `apply_low_precision_groupnorm` to `state.model` with `state.precision`, after
    all algorithms that add or replace norms. Parameters keep their names. Loading a checkpoint that was trained with
    it applies it, so that the run resumes in the same precision.

    Args:
        apply_at: `Event.INIT`, `Event.BEFORE_LOAD` or `Event.AFTER_LOAD`.

    Raises:
        ValueError: If `apply_at` is any other event.

    Example:
        >>> LowPrecisionGroupNorm()
        LowPrecisionGroupNorm(apply_at=Event.INIT)
    """

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Convert the norms."""
        apply_low_precision_groupnorm(state.model, state.precision, state.optimizers)
