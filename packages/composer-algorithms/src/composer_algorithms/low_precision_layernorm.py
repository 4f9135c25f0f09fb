"""Low precision LayerNorm: normalize in the autocast dtype instead of float32."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._low_precision import LowPrecisionNorm, in_autocast_dtype, swap_norms
from composer_algorithms.metadata import METHODS
from composer_dist.devices import Precision
from composer_events import Event, Logger, State

__all__ = ["LPLayerNorm", "LowPrecisionLayerNorm", "apply_low_precision_layernorm", "METADATA"]

METADATA = METHODS["low_precision_layernorm"]


class LPLayerNorm(nn.LayerNorm):
    """A `torch.nn.LayerNorm` that computes in the dtype of the surrounding autocast.

    Args:
        normalized_shape: As in `torch.nn.LayerNorm`.
        eps: As in `torch.nn.LayerNorm`.
        elementwise_affine: As in `torch.nn.LayerNorm`.
        device: As in `torch.nn.LayerNorm`.
        dtype: As in `torch.nn.LayerNorm`.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LPLayerNorm(4)(torch.rand(2, 4)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps=eps, elementwise_affine=elementwise_affine, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize over the last dims in the autocast dtype."""

        def normalize(low: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return F.layer_norm(low, self.normalized_shape, weight, bias, self.eps)

        return in_autocast_dtype(normalize, input, self.weight, self.bias)


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: Precision | str | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> nn.Module:
    """Convert the `torch.nn.LayerNorm` modules of a model to `LPLayerNorm`.

    Each one stays the same object with the same parameters. Subclasses with a `forward` of their own are not
    converted. A second call changes nothing.

    Args:
        model: Changed in place.
        precision: Training precision. Only `'amp_fp16'` and `'amp_bf16'` have an effect.
        optimizers: Existing optimizers of the model. No parameter is added or removed.

    Returns:
        The model.

    Warns:
        NoEffectWarning: If `precision` is any other, or the model has no `torch.nn.LayerNorm` to convert.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> type(apply_low_precision_layernorm(model, "amp_bf16")[1]).__name__
        'LPLayerNorm'
    """
    return swap_norms(model, nn.LayerNorm, LPLayerNorm, precision, optimizers)


class LowPrecisionLayerNorm(LowPrecisionNorm):
    """Compute LayerNorm in low precision.

    On the event `apply_at` it applies `apply_low_precision_layernorm` to `state.model` with `state.precision`, after
    all algorithms that add or replace norms. Parameters keep their names. Loading a checkpoint that was trained with
    it applies it, so that the run resumes in the same precision.

    Args:
        apply_at: `Event.INIT`, `Event.BEFORE_LOAD` or `Event.AFTER_LOAD`.

    Raises:
        ValueError: If `apply_at` is any other event.

    Example:
        >>> LowPrecisionLayerNorm()
        LowPrecisionLayerNorm(apply_at=Event.INIT)
    """

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Convert the norms."""
        apply_low_precision_layernorm(state.model, state.precision, state.optimizers)
