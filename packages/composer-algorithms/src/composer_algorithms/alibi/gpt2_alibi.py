"""The functions that older releases gave to `apply_alibi` for GPT-2. The present one needs neither."""

from typing import Any

import torch
from torch import Tensor, nn

from composer_algorithms.alibi.attention import add_bias

__all__ = ["enlarge_mask"]


def _attn(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention with ALiBi, in the place of a method `_attn` of an attention module.

    Returns:
        The output of shape `(batch, heads, queries, depth)` and the attention weights.
    """
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    scores = scores + add_bias(self.alibi_slopes, None, *scores.shape[-2:], is_causal=True)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = self.attn_dropout(torch.softmax(scores, dim=-1).to(value.dtype))
    if head_mask is not None:
        weights = weights * head_mask
    return torch.matmul(weights, value), weights


def enlarge_mask(module: nn.Module, max_sequence_length: int) -> nn.Module:
    """Enlarge the causal mask that an attention module keeps as its buffer `bias`, if it has one.

    Args:
        module: Changed in place.
        max_sequence_length: Side of the new mask.

    Returns:
        The module.

    Example:
        >>> attention = nn.Module()
        >>> attention.register_buffer("bias", torch.ones(1, 1, 2, 2, dtype=torch.bool).tril())
        >>> enlarge_mask(attention, 4).bias.shape
        torch.Size([1, 1, 4, 4])
    """
    old = getattr(module, "bias", None)
    if isinstance(old, Tensor):
        is_saved = "bias" in module.state_dict()
        causal = torch.ones(max_sequence_length, max_sequence_length, dtype=torch.bool, device=old.device).tril()
        module.register_buffer("bias", causal[None, None], persistent=is_saved)
    return module
