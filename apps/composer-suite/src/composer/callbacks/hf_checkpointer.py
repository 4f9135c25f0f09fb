"""Callback that writes Hugging Face folders during training."""

from importlib.util import find_spec

from composer_models import MissingConditionalImportError

if find_spec("composer_hf") is None:
    raise MissingConditionalImportError("hf", "composer-hf", None)

from composer_hf.checkpointer import HuggingFaceCheckpointer

__all__ = ["HuggingFaceCheckpointer"]
