"""Attention with ALiBi, as functions for the attention and mask registries of transformers."""

import functools
import logging
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "attention_name",
    "register_attention_functions",
    "alibi_bias",
    "alibi_slopes",
    "register_alibi",
    "zero_and_freeze_expand_position_embeddings",
]

_log = logging.getLogger("composer.algorithms.alibi")
_PREFIX = "composer_alibi_"


def attention_name(implementation: str | None) -> str:
    """Return the name of the ALiBi implementation for an attention implementation of transformers.

    Args:
        implementation: `'eager'`, `'sdpa'`, `'flex_attention'`, or one of these with ALiBi already. Any other, such as
            the flash attention of transformers, takes no bias and is replaced by `'sdpa'`.
    """
    if implementation is None or implementation.startswith(_PREFIX):
        return implementation or f"{_PREFIX}eager"
    if implementation in ("eager", "sdpa"):
        return _PREFIX + implementation
    if implementation == "flex_attention":
        return f"{_PREFIX}flex"
    _log.warning(
        "ALiBi uses torch's scaled_dot_product_attention instead of attn_implementation=%r, which takes no bias. "
        "'flex_attention' needs less memory for long sequences.",
        implementation,
    )
    return f"{_PREFIX}sdpa"


@functools.cache
def register_attention_functions() -> None:
    """Register the ALiBi functions with transformers, with the same masks as the functions they replace.

    Without registered masks, models would build no mask at all and attend to padding.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # optional, and slow to import
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for base, function, mask in (
        ("eager", _eager_attention, "eager"),
        ("sdpa", _sdpa_attention, "sdpa"),
        ("flex", _flex_attention, "flex_attention"),
    ):
        ALL_ATTENTION_FUNCTIONS.register(_PREFIX + base, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + base, ALL_MASK_ATTENTION_FUNCTIONS[mask])


def add_bias(slopes: Tensor, mask: Tensor | None, num_queries: int, num_keys: int, is_causal: bool) -> Tensor:
    """Merge the bias and the causal mask into an attention mask in float32, to be added to the scaled scores.

    `mask` broadcasts to `(batch, heads, queries, keys)`: true where attention is allowed, or added to the scores. With
    a cache of earlier keys, there are more keys than queries.
    """
    offset: int | Tensor = num_keys - num_queries
    if is_causal and mask is not None and num_keys != num_queries:
        offset = _query_offset(mask, num_queries)
    queries = torch.arange(num_queries, device=slopes.device) + offset
    bias = alibi_bias(slopes, queries, num_keys)
    lowest = torch.finfo(torch.float32).min  # not -inf: a fully masked row would have a softmax of NaN
    if mask is None:
        if is_causal and num_queries > 1:
            keys = torch.arange(num_keys, device=slopes.device)
            bias = bias.masked_fill(keys > queries[:, None], lowest)
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, lowest)
    return bias + mask


def _query_offset(mask: Tensor, num_queries: int) -> Tensor:
    """Return the position of the first query; static caches have room for keys that do not exist yet."""
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    keys = torch.arange(mask.shape[-1], device=mask.device)
    last_query = torch.where(allowed[..., -1, :], keys, 0).amax()  # for the longest sequence in the batch
    return last_query - (num_queries - 1)


def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    mask, slopes = attention_mask, getattr(module, "alibi_slopes", None)
    if slopes is not None:
        mask = add_bias(slopes, mask, query.shape[2], key.shape[2], is_causal=_is_causal(module, kwargs))
    return _with_weights(module, query, key, value, mask, scaling, dropout)


def _sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # already loaded by the caller

    slopes = getattr(module, "alibi_slopes", None)
    if slopes is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    is_causal = _is_causal(module, kwargs)
    num_queries, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None and is_causal and num_queries > 1 and num_keys > num_queries:
        # Prefill of a static cache: the keys after the queries do not exist yet.
        key, value, num_keys = key[:, :, :num_queries], value[:, :, :num_queries], num_queries
    mask = add_bias(slopes, attention_mask, num_queries, num_keys, is_causal)
    # transformers 4 ignores position_bias here, so the bias goes into the mask. Clamped, since the lowest float32 is
    # minus infinity in float16, and the softmax of a row of only those is NaN.
    if query.dtype != torch.float64:
        mask = mask.clamp_min(torch.finfo(query.dtype).min)
    mask = mask.to(query.dtype)
    if kwargs.get("output_attentions"):
        kwargs.pop("is_causal", None)
        return _with_weights(module, query, key, value, mask, **kwargs)
    return sdpa_attention_forward(module, query, key, value, mask, **{**kwargs, "is_causal": False})


def _with_weights(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention and its weights explicitly, since transformers has no eager function to call."""
    # In float32, because the bias of distant tokens has more digits than 16-bit scores hold.
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * _scaling(module, query, scaling)
    scores = scores if mask is None else scores + mask
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(dropped, value).transpose(1, 2).contiguous(), weights


def _flex_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    from transformers.integrations import flex_attention as flex  # already loaded by the caller

    slopes = getattr(module, "alibi_slopes", None)
    if slopes is None or isinstance(attention_mask, Tensor):
        if slopes is None:
            return flex.flex_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return _sdpa_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # With a cache, queries are at the end of the keys. With a static cache the offset is too large by its free slots,
    # which lowers all scores of a causal query by the same amount and does not change their softmax.
    offset = key.shape[2] - query.shape[2]

    # Computed per score inside the kernel: no tensor of queries times keys is ever stored.
    def lowered(score: Tensor, batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        return score - slopes[head] * (query_index + offset - key_index).abs()

    output: Any = flex.compile_friendly_flex_attention(
        query,
        key,
        value,
        score_mod=lowered,
        block_mask=attention_mask,
        scale=_scaling(module, query, scaling),
        training=module.training,
    )
    return output.transpose(1, 2).contiguous(), None


def _scaling(module: Any, query: Tensor, scaling: float | None) -> float:
    if scaling is not None:
        return scaling
    # In transformers 4, GPT-2 leaves the scaling to the attention function.
    scale = query.shape[-1] ** -0.5 if getattr(module, "scale_attn_weights", True) else 1.0
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        scale /= module.layer_idx + 1
    return scale


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    is_causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


@functools.cache
def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head.

    For `n` a power of two: `2^(-8/n), 2^(-16/n), ...`. Otherwise the slopes of the next lower power of two, followed by
    every other slope of the next higher one.

    Args:
        num_heads: Number of heads, 1 or more.

    Example:
        >>> alibi_slopes(4)
        (0.25, 0.0625, 0.015625, 0.00390625)

    Reference:
        Press et al., "Train Short, Test Long", ICLR 2022, arXiv:2108.12409, section 3 and its code for other numbers.
    """
    lower = 2 ** (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    between = [2 ** (-8 * (i + 1) / (2 * lower)) for i in range(0, 2 * lower, 2)]
    return tuple((slopes + between)[:num_heads])


def alibi_bias(slopes: Tensor, query_positions: Tensor, num_keys: int) -> Tensor:
    """Return `-slope * |query - key|` for all pairs of positions, in float32.

    bfloat16 cannot represent all distances above 256, so round the product, not its factors.

    Args:
        slopes: Shape `(heads,)`.
        query_positions: Shape `(queries,)`; positions count from 0, as for the keys.
        num_keys: Number of keys.

    Returns:
        Shape `(1, heads, queries, num_keys)`.

    Example:
        >>> alibi_bias(torch.tensor([0.5]), torch.arange(2), num_keys=3)
        tensor([[[[-0.0000, -0.5000, -1.0000],
                  [-0.5000, -0.0000, -0.5000]]]])
    """
    keys = torch.arange(num_keys, device=slopes.device, dtype=torch.float32)
    distances = (query_positions.to(torch.float32)[:, None] - keys).abs()
    return -slopes.float()[None, :, None, None] * distances


def register_alibi(module: nn.Module, n_heads: int, max_token_length: int | None = None, causal: bool = False) -> None:
    """Register the slopes of an attention module's heads as the non-persistent buffer `alibi_slopes`.

    Args:
        module: Attention module, changed in place.
        n_heads: Number of its heads.
        max_token_length: Not used: the bias is computed for the length of each input.
        causal: Not used: causal and bidirectional attention have the same bias.

    Example:
        >>> attention = nn.Module()
        >>> register_alibi(attention, n_heads=2)
        >>> attention.alibi_slopes
        tensor([0.0625, 0.0039])
    """
    first = next(module.parameters(), None)  # the buffer must be on the device of the module
    slopes = torch.tensor(alibi_slopes(n_heads), dtype=torch.float32, device=None if first is None else first.device)
    module.register_buffer("alibi_slopes", slopes, persistent=False)


def zero_and_freeze_expand_position_embeddings(
    module: nn.Module, max_sequence_length: int, position_embedding_attribute: str
) -> None:
    """Replace a table of position embeddings with frozen zeros for a given number of positions.

    Args:
        module: Owner of the table, changed in place.
        max_sequence_length: Number of positions.
        position_embedding_attribute: Dotted path from the module to its `nn.Embedding`.

    Raises:
        AttributeError: If the path does not exist.
        TypeError: If the object at the path has no parameter as its `weight`.

    Example:
        >>> model = nn.Module()
        >>> model.wpe = nn.Embedding(4, 8)
        >>> zero_and_freeze_expand_position_embeddings(model, 16, "wpe")
        >>> model.wpe.weight.shape, model.wpe.weight.any().item(), model.wpe.weight.requires_grad
        (torch.Size([16, 8]), False, False)
    """
    try:
        embedding: Any = attrgetter(position_embedding_attribute)(module)
        weight = embedding.weight
    except AttributeError:
        _log.error(
            "%s has no position embeddings at position_embedding_attribute=%r.",
            type(module).__qualname__,
            position_embedding_attribute,
        )
        raise
    if not isinstance(weight, nn.Parameter):
        raise TypeError(
            f"position_embedding_attribute={position_embedding_attribute!r} is a "
            f"{type(embedding).__qualname__} whose weight is a {type(weight).__qualname__}, not a parameter: name the "
            f"nn.Embedding of the positions."
        )
    zeros = torch.zeros(
        max_sequence_length, weight.shape[1], dtype=weight.dtype, layout=weight.layout, device=weight.device
    )
    embedding.weight = nn.Parameter(zeros, requires_grad=False)
    # Keep the representation, and checks against the number of positions, right.
    if isinstance(embedding, nn.Embedding):
        embedding.num_embeddings = max_sequence_length
