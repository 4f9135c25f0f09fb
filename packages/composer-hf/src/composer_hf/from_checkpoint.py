"""From a Composer checkpoint to a model and a tokenizer of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from composer_checkpoint.tensors import open_checkpoint
from composer_hf.adapters import is_peft_model
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.published_weights import plan_weights, published_name, tied_names
from composer_hf.publishing import local_checkpoint, on_meta
from composer_hf.saved_state import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["hf_from_composer_checkpoint"]


def hf_from_composer_checkpoint(
    checkpoint_path: Path | str,
    model_instantiation_class: type | str | None = None,
    model_config_kwargs: Mapping[str, Any] | None = None,
    local_checkpoint_save_location: Path | str | None = None,
    trust_remote_code: bool = False,
    *,
    load_weights: bool = False,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """Return the model and the tokenizer that a checkpoint describes.

    By default the weights are as they are drawn, for a Trainer that gets the checkpoint as its `load_path`.

    Args:
        checkpoint_path: A file or folder that a Trainer has saved, or an address in a store.
        model_instantiation_class: In place of the model's class: a class, an auto class, or the full name of one, such
            as `'transformers.AutoModelForSequenceClassification'`.
        model_config_kwargs: Values in place of the configuration's, such as `{'num_labels': 3}`.
        local_checkpoint_save_location: Where a checkpoint from a store is kept, and a link to a local one is put.
        trust_remote_code: Whether code that came with the checkpoint is imported.
        load_weights: Whether the model has the checkpoint's weights.

    Returns:
        The model, and the tokenizer if the checkpoint has one.

    Raises:
        MissingMetadataError: If the checkpoint is of no Hugging Face model.
        ValueError, AttributeError: If the class cannot be imported, or is no model's.
        CheckpointError: If the checkpoint is damaged, unsafe, or of a model that transformers does not know.
    """
    with local_checkpoint(checkpoint_path, local_checkpoint_save_location) as path, open_checkpoint(path) as source:
        metadata = HuggingFaceMetadata.from_checkpoint(source.tree, checkpoint_path)
        saved = source.state["integrations"]["huggingface"]
        model = load_model(saved, model_instantiation_class, model_config_kwargs, trust_remote_code=trust_remote_code)
        if load_weights:
            stored = source.weights
            pieces = [] if is_peft_model(model) else plan_weights(on_meta(stored), metadata)
            read = {name: tensor.read() for name, tensor in stored.items()}
            published = {k: v for piece in pieces for k, v in piece.convert(read).items()}
            model = _with_weights(model, {published_name(name): weight for name, weight in read.items()}, published)
        tokenizer = load_tokenizer(saved, trust_remote_code)
    return model, tokenizer


def _with_weights(model: Any, weights: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> Any:
    """Return the model with weights that have the names of this release in memory, or else those of a folder."""
    if is_peft_model(model):
        model.load_state_dict(weights, strict=False)  # the base model's are not in the checkpoint
        return model
    if weights.keys() <= model.state_dict().keys():
        ties = tied_names(model)
        model.load_state_dict(weights, strict=not ties)
        model.tie_weights()
        return model
    return type(model).from_pretrained(None, config=model.config, state_dict=dict(published))
