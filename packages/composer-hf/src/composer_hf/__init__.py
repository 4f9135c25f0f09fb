"""Training, checkpointing and publishing of Hugging Face models.

- `model`: `HuggingFaceModel`, which adapts any model of transformers to the training loop.
- `causal_lm`: `ComposerHFCausalLM`, a causal language model built from its name or path and a configuration.
- `checkpointer`: `HuggingFaceCheckpointer`, which writes Hugging Face folders during training, and with `registering`
  adds them to the model registry of MLflow.
- `publishing`: converts a checkpoint to such a folder. Its parts `metadata`, `published_weights` and `weight_files`
  load neither the weights nor transformers before they are used.
- `saved_state`: restores a model and a tokenizer from a checkpoint.
- `adapters`: LoRA. `sharding_hints`: the units that FSDP shards.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_hf.adapters import filter_state_dict_peft as filter_state_dict_peft
    from composer_hf.adapters import maybe_get_underlying_model as maybe_get_underlying_model
    from composer_hf.causal_lm import ComposerHFCausalLM as ComposerHFCausalLM
    from composer_hf.causal_lm import hf_causal_lm as hf_causal_lm
    from composer_hf.checkpointer import HuggingFaceCheckpointer as HuggingFaceCheckpointer
    from composer_hf.metadata import HuggingFaceMetadata as HuggingFaceMetadata
    from composer_hf.metadata import MissingMetadataError as MissingMetadataError
    from composer_hf.model import HuggingFaceModel as HuggingFaceModel
    from composer_hf.published_weights import PublishedPiece as PublishedPiece
    from composer_hf.published_weights import plan_weights as plan_weights
    from composer_hf.publishing import (
        write_huggingface_pretrained_from_composer_checkpoint as write_huggingface_pretrained_from_composer_checkpoint,
    )
    from composer_hf.saved_state import (
        get_hf_config_from_composer_state_dict as get_hf_config_from_composer_state_dict,
    )
    from composer_hf.saved_state import (
        get_peft_config_from_composer_state_dict as get_peft_config_from_composer_state_dict,
    )
    from composer_hf.saved_state import hf_from_composer_checkpoint as hf_from_composer_checkpoint
    from composer_hf.sharding_hints import prepare_hf_model_for_fsdp as prepare_hf_model_for_fsdp

# Names are imported on first use: torch and transformers take seconds to load.
_HOME = {
    "HuggingFaceModel": "model",
    "ComposerHFCausalLM": "causal_lm",
    "hf_causal_lm": "causal_lm",
    "HuggingFaceCheckpointer": "checkpointer",
    "hf_from_composer_checkpoint": "saved_state",
    "write_huggingface_pretrained_from_composer_checkpoint": "publishing",
    "get_hf_config_from_composer_state_dict": "saved_state",
    "get_peft_config_from_composer_state_dict": "saved_state",
    "filter_state_dict_peft": "adapters",
    "maybe_get_underlying_model": "adapters",
    "prepare_hf_model_for_fsdp": "sharding_hints",
    "HuggingFaceMetadata": "metadata",
    "MissingMetadataError": "metadata",
    "PublishedPiece": "published_weights",
    "plan_weights": "published_weights",
}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # declared in the block above

__version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # slow, and rarely needed

        value: object = version("composer-hf")
    elif name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # later accesses bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
