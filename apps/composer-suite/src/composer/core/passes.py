"""What orders the algorithms of an event."""

from composer_events.passes import (
    AlgorithmPass,
    set_filo_order,
    sort_fused_layernorm_last,
    sort_low_precision_layernorm_last,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    warn_if_multiple_loss_interpolation,
)

__all__ = [
    "AlgorithmPass",
    "set_filo_order",
    "sort_to_front",
    "sort_to_back",
    "sort_selective_backprop_first",
    "sort_low_precision_layernorm_last",
    "sort_fused_layernorm_last",
    "warn_if_multiple_loss_interpolation",
]
