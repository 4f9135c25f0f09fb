"""Whether a model has an embedding for each token of a tokenizer."""

from logging import getLogger
from typing import Any

__all__ = ["fit_vocabulary"]

log = getLogger(__name__)


def fit_vocabulary(model: Any, tokenizer: Any, *, may_resize: bool) -> None:
    """Refuse a tokenizer that has more tokens than the model, or let the model's embeddings grow.

    Args:
        model: Of transformers.
        tokenizer: The tokenizer.
        may_resize: Whether they may grow.

    Raises:
        ValueError: If there are more tokens, and they may not.
    """
    num_embeddings, num_tokens = _num_embeddings(model), len(tokenizer)
    if num_embeddings is None or num_embeddings == num_tokens:
        return
    if num_embeddings > num_tokens:
        log.info(
            "The number of tokens in the tokenizer is less than the number of tokens in the model: %d and %d. "
            "Embeddings are left as they are.",
            num_tokens,
            num_embeddings,
        )
        return
    message = (
        f"The number of tokens in the tokenizer is greater than the number of tokens in the model: {num_tokens} and "
        f"{num_embeddings}."
    )
    if not may_resize:
        raise ValueError(
            f"{message} Tokens without an embedding would fail in the middle of training. Resize the embeddings with "
            f"model.resize_token_embeddings({num_tokens}), or pass allow_embedding_resizing=True."
        )
    log.warning("%s The embeddings are resized.", message)
    model.resize_token_embeddings(num_tokens)


def _num_embeddings(model: Any) -> int | None:
    size = getattr(model.config, "vocab_size", None)
    if size is None:
        embeddings = model.get_input_embeddings()
        size = getattr(embeddings, "num_embeddings", None)
    return size
