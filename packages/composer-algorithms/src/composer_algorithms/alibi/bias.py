"""The bias: for each head a slope, times the distance of two tokens."""

import functools

import torch
from torch import Tensor, nn

__all__ = ["alibi_bias", "alibi_slopes", "register_alibi"]


@functools.cache
def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head.

    For a power of two they are `2^(-8/n), 2^(-16/n), ...`. Otherwise those of the next lower power of two, followed by
    every other slope of the next higher one.

    Args:
        num_heads: The number of heads, 1 or more.

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

    bfloat16 cannot tell distances above 256 apart, so the product is what should be rounded, not its factors.

    Args:
        slopes: Shape `(heads,)`.
        query_positions: Shape `(queries,)`, counted as the keys are, from 0.
        num_keys: How many keys there are.

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
    """Give an attention module the slopes of its heads, as the buffer `alibi_slopes`, which is not saved.

    Args:
        module: Changed in place.
        n_heads: The number of its heads.
        max_token_length: Not used: the bias is computed for the length at hand.
        causal: Not used: the same bias serves both directions.

    Example:
        >>> attention = nn.Module()
        >>> register_alibi(attention, n_heads=2)
        >>> attention.alibi_slopes
        tensor([0.0625, 0.0039])
    """
    first = next(module.parameters(), None)
    slopes = torch.tensor(alibi_slopes(n_heads), dtype=torch.float32, device=None if first is None else first.device)
    module.register_buffer("alibi_slopes", slopes, persistent=False)
