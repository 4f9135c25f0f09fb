"""Low precision LayerNorm: normalization in the dtype of the autocast, instead of in float32."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._low_precision import LowPrecisionNorm, swap_norms, to_autocast_dtype
from composer_algorithms.metadata import Metadata
from composer_dist.devices import Precision
from composer_events.event import Event

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["LPLayerNorm", "LowPrecisionLayerNorm", "apply_low_precision_layernorm", "METADATA"]

METADATA = Metadata(
    name="Low Precision LayerNorm",
    class_name="LowPrecisionLayerNorm",
    functional="apply_low_precision_layernorm",
    tldr="Computes LayerNorm in the low precision of the autocast",
    attribution="MosaicML",
    link="",
    domains=("nlp", "cv"),
    summary=(
        "Under autocast PyTorch computes normalization in float32 and gives float32 to what follows. This computes it "
        "in float16 or bfloat16, which saves the casts and half of the memory traffic."
    ),
    use=(
        "Recommended in mixed precision with float32 weights. The sums inside stay float32; still, a loss spike now "
        "and then has been seen. It has no effect in float32, and little under torch.compile, which fuses the casts."
    ),
)


class LPLayerNorm(nn.LayerNorm):
    """A `torch.nn.LayerNorm` that computes in the dtype of the autocast around it.

    Args:
        normalized_shape: As in `torch.nn.LayerNorm`.
        eps: As there.
        elementwise_affine: As there.
        device: As there.
        dtype: As there.

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
        """Normalize the last dims."""
        device_type = input.device.type
        low, weight, bias = (to_autocast_dtype(one, device_type) for one in (input, self.weight, self.bias))
        assert low is not None  # as the input is not
        with torch.autocast(device_type, enabled=False):
            return F.layer_norm(low, self.normalized_shape, weight, bias, self.eps)


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: Precision | str | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> nn.Module:
    """Let the norms of a model compute in the dtype of the autocast around them.

    Each `torch.nn.LayerNorm` becomes an `LPLayerNorm`: the same object with the same parameters. Subclasses that
    compute something of their own are left alone. A second call changes nothing.

    Args:
        model: Changed in place.
        precision: What the model is trained in. Only `'amp_fp16'` and `'amp_bf16'` have an effect.
        optimizers: Those that train the model, if they exist already. No parameter is added or removed.

    Returns:
        The model.

    Warns:
        NoEffectWarning: If `precision` is another one, or the model has no such norms.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> type(apply_low_precision_layernorm(model, "amp_bf16")[1]).__name__
        'LPLayerNorm'
    """
    return swap_norms(model, nn.LayerNorm, LPLayerNorm, precision, optimizers)


class LowPrecisionLayerNorm(LowPrecisionNorm):
    """Compute LayerNorm in low precision: on one event, the norms in `state.model` are changed in place.

    The precision is that of the state. It acts after all algorithms that make norms. Parameters and their names stay.
    Loading a checkpoint applies it, so that training goes on in the same precision.

    Args:
        apply_at: `Event.INIT`, `Event.BEFORE_LOAD` or `Event.AFTER_LOAD`.

    Raises:
        ValueError: If `apply_at` is another event.

    Example:
        >>> LowPrecisionLayerNorm()
        LowPrecisionLayerNorm(apply_at=Event.INIT)
    """

    def apply(self, event: Event, state: "State", logger: "Logger | None") -> None:
        """Change the norms."""
        apply_low_precision_layernorm(state.model, state.precision, state.optimizers)
