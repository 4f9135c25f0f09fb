"""Of which kind the model and the tokenizer of a `HuggingFaceModel` must be, so that checkpoints can describe them."""

import os
from collections.abc import Sized
from typing import Any

from torch import nn

__all__ = ["check_model", "check_tokenizer"]


def check_model(model: Any) -> None:
    """Refuse what is no model of transformers, and does not look like one.

    Raises:
        TypeError: If it is no module, or has no configuration of transformers.
    """
    if isinstance(model, str | os.PathLike):
        raise TypeError(
            f"model={model!r} is a name, and the model itself is needed. Give "
            f"AutoModelForCausalLM.from_pretrained({model!r}) of transformers, or what another of its Auto classes "
            f"makes of the name."
        )
    if isinstance(model, type):
        raise TypeError(
            f"model={model!r} is a class, and a model is needed. Give {model.__name__}(config), or "
            f"{model.__name__}.from_pretrained(...)."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={model!r:.200} is no torch.nn.Module. HuggingFaceModel takes a PreTrainedModel of transformers, or "
            f"a peft.PeftModel."
        )
    if not hasattr(getattr(model, "config", None), "to_json_string"):
        raise TypeError(
            f"model={model!r:.200} has no `config` of transformers, which every checkpoint keeps. HuggingFaceModel "
            f"takes a PreTrainedModel of transformers, or a peft.PeftModel. Wrap another module with "
            f"ComposerModel.from_module(module, loss_fn), of composer.models."
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that no checkpoint could keep. Any object with a length and `save_pretrained` is one.

    Raises:
        TypeError: If it has not both.
    """
    if isinstance(tokenizer, str | os.PathLike):
        raise TypeError(
            f"tokenizer={tokenizer!r} is a name, and the tokenizer itself is needed: every checkpoint calls its "
            f"save_pretrained. Give AutoTokenizer.from_pretrained({tokenizer!r}) of transformers."
        )
    if isinstance(tokenizer, type):
        raise TypeError(
            f"tokenizer={tokenizer!r} is a class, and a tokenizer is needed. Give "
            f"{tokenizer.__name__}.from_pretrained(...)."
        )
    if not (isinstance(tokenizer, Sized) and hasattr(tokenizer, "save_pretrained")):
        raise TypeError(
            f"tokenizer={tokenizer!r:.200} is no tokenizer, which has len() and save_pretrained, as those of "
            f"transformers have. Give AutoTokenizer.from_pretrained(...), or "
            f"PreTrainedTokenizerFast(tokenizer_object=...) around a tokenizers.Tokenizer. With None, "
            f"checkpoints keep none."
        )
