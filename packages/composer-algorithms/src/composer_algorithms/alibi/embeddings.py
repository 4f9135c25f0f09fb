"""Position embeddings that say nothing any more."""

import logging
from operator import attrgetter
from typing import Any

import torch
from torch import nn

__all__ = ["zero_and_freeze_expand_position_embeddings"]

_log = logging.getLogger("composer.algorithms.alibi")


def zero_and_freeze_expand_position_embeddings(
    module: nn.Module, max_sequence_length: int, position_embedding_attribute: str
) -> None:
    """Replace a table of position embeddings by zeros that are not trained, for a given number of positions.

    Args:
        module: Owns the table; changed in place.
        max_sequence_length: The number of positions.
        position_embedding_attribute: Where the module has its `nn.Embedding`, with dots between the parts.

    Raises:
        AttributeError: If there is nothing.
        TypeError: If what is there has no parameter as its `weight`.

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
            f"position_embedding_attribute={position_embedding_attribute!r} leads to a "
            f"{type(embedding).__qualname__} whose weight is a {type(weight).__qualname__}, no parameter: name the "
            f"nn.Embedding of the positions."
        )
    zeros = torch.zeros(
        max_sequence_length, weight.shape[1], dtype=weight.dtype, layout=weight.layout, device=weight.device
    )
    embedding.weight = nn.Parameter(zeros, requires_grad=False)
    if isinstance(embedding, nn.Embedding):
        embedding.num_embeddings = max_sequence_length
