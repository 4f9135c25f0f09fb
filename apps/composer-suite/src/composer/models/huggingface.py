"""Hugging Face models, and functions to save them to and load them from checkpoints."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from composer._lazy import replace_module
from composer_models import MissingConditionalImportError

if find_spec("composer_hf") is None:
    raise MissingConditionalImportError("hf", "composer-hf", None)

if TYPE_CHECKING:
    from composer_hf.model import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]  # the same module

# The same module, not a copy of its names, since users patch `peft_installed` here.
replace_module(__name__, "composer_hf.model")
