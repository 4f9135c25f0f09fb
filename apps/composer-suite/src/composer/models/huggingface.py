"""Hugging Face models, and their way from and to checkpoints."""

from importlib.util import find_spec

from composer._lazy import replace_module
from composer_models import MissingConditionalImportError

if find_spec("composer_hf") is None:
    raise MissingConditionalImportError("hf", "composer-hf", None)

# Users patch `peft_installed` here.
replace_module(__name__, "composer_hf.model")
