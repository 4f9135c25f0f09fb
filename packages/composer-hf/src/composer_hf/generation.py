"""Evaluation of a model by the text that it generates."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer_dist import dist

if TYPE_CHECKING:
    from composer_hf.model import HuggingFaceModel

__all__ = ["continuations"]


def continuations(model: "HuggingFaceModel", batch: Mapping[str, Any]) -> list[str]:
    """Return the text with which a model goes on from each of a batch's prompts. Every rank must call this.

    Args:
        model: The model.
        batch: Has `input_ids`, and may have `attention_mask` and `generation_kwargs`.

    Raises:
        ValueError: If the model has no tokenizer.
    """
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise ValueError(
            "Generation eval cannot be used without providing a tokenizer to the model constructor. Pass "
            "tokenizer=... to HuggingFaceModel."
        )
    prompts = batch["input_ids"]
    generated = model.generate(
        prompts,
        attention_mask=batch.get("attention_mask"),
        synced_gpus=dist.get_world_size() > 1,
        **batch.get("generation_kwargs", {}),
    )
    # A model with an encoder gives back what the decoder made, and the others begin with the prompt.
    new = generated if model.config.is_encoder_decoder else generated[:, prompts.shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    if len(tokenizer(" a", add_special_tokens=False)["input_ids"]) != 1:
        return [f" {text}" for text in texts]  # which decoding took away from the first word
    return texts
