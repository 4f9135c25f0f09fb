"""From a Hugging Face model to what a checkpoint says of it, and back, without the weights."""

import json
import random
import string
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from composer_hf.adapters import adapter_of, is_peft_model, maybe_get_underlying_model, peft_config_values
from composer_hf.code_settings import without_code
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import build_config, build_model, find_class
from composer_hf.pretrained_folder import write_tokenizer
from composer_hf.tokenizer_files import encode_files

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "describe",
    "get_hf_config_from_composer_state_dict",
    "get_peft_config_from_composer_state_dict",
    "load_model",
    "load_tokenizer",
]

_JSON: Final = ".json"


def describe(
    model: Any, tokenizer: "PreTrainedTokenizerBase | None", trained_beside_adapter: Iterable[str] = ()
) -> dict[str, Any]:
    """Return what a checkpoint says of a model and its tokenizer, in values that load without running code.

    Args:
        model: Of transformers, or wrapped by peft.
        tokenizer: Its tokenizer, if it has one.
        trained_beside_adapter: As `HuggingFaceModel.names_trained_beside_adapter` returns them.

    Returns:
        The layout that Composer's checkpoints have under `state/integrations/huggingface`, in which
            `generation_config` and `trained_beside_adapter` are ours.
    """
    inner = maybe_get_underlying_model(model)
    config: dict[str, Any] = json.loads(inner.config.to_json_string(use_diff=False))
    if not config.get("architectures"):
        config["architectures"] = [_original_class(inner).__name__]
    described: dict[str, Any] = {"config": _entry(config, _original_class(inner))}
    if (generation := getattr(inner, "generation_config", None)) is not None:
        described["generation_config"] = _entry(json.loads(generation.to_json_string()), type(generation))
    if is_peft_model(model):
        peft_config = model.peft_config[adapter_of(model)]
        described["peft_config"] = _entry(peft_config_values(peft_config), type(peft_config))
        described["trained_beside_adapter"] = sorted(trained_beside_adapter)
    return {"model": described, "tokenizer": {} if tokenizer is None else _tokenizer_files(tokenizer)}


def get_hf_config_from_composer_state_dict(
    state_dict: Mapping[str, Any],
    config_overrides: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    allow_network: bool = False,
) -> "PretrainedConfig":
    """Return the configuration of the Hugging Face model that a checkpoint is of.

    Args:
        state_dict: The checkpoint's content.
        config_overrides: Values in place of the checkpoint's.
        trust_remote_code: Whether code that lies where the model came from may be run.
        allow_network: Whether an architecture that transformers does not know may be looked for on the Hub.

    Raises:
        MissingMetadataError: If the checkpoint is of no such model.
        IncompatibleCheckpointError: If transformers does not know the architecture.
    """
    metadata = HuggingFaceMetadata.from_checkpoint(state_dict)
    return build_config(metadata, config_overrides, trust_remote_code=trust_remote_code, allow_network=allow_network)


def get_peft_config_from_composer_state_dict(state_dict: Mapping[str, Any]) -> "PeftConfig | None":
    """Return the configuration of the adapter that a checkpoint is of, or `None` if it has none."""
    metadata = HuggingFaceMetadata.from_checkpoint(state_dict)
    if metadata.peft_config is None:
        return None
    from peft import get_peft_config  # optional, and who has such a checkpoint needs it

    return get_peft_config(without_code(metadata.peft_config))


def load_tokenizer(
    hf_state: Mapping[str, Any], trust_remote_code: bool = False, tokenizer_save_dir: str | None = None
) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer of a checkpoint; see `HuggingFaceModel.load_huggingface_tokenizer_from_saved_state`."""
    if not hf_state.get("tokenizer"):
        return None
    from transformers import AutoTokenizer  # it takes seconds to load

    metadata = HuggingFaceMetadata.from_saved(hf_state)
    letters = string.ascii_lowercase + string.digits
    # Not of the seeded generator, which training draws from.
    name = tokenizer_save_dir or f"tokenizer-save-dir-{''.join(random.SystemRandom().choices(letters, k=6))}"
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, metadata, trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    settings = json.loads(metadata.tokenizer_files.get("tokenizer_config.json", b"{}"))
    tokenizer.name_or_path = settings.get("name_or_path") or ""
    return tokenizer


def load_model(
    hf_state: Mapping[str, Any],
    model_instantiation_class: type | str | None = None,
    model_config_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> "PreTrainedModel":
    """Return a model as a checkpoint describes it, with weights as they are drawn.

    See `HuggingFaceModel.load_huggingface_model_from_saved_state`.
    """
    metadata = HuggingFaceMetadata.from_saved(hf_state)
    config = build_config(metadata, model_config_kwargs, trust_remote_code=trust_remote_code)
    given = model_instantiation_class
    if given is None:
        model_class = find_class(metadata.model_class, trust_remote_code=trust_remote_code)
    elif isinstance(given, str):
        model_class = find_class(given, trust_remote_code=True)  # the caller has named it
    else:
        model_class = given
    model = build_model(model_class, config)
    if metadata.peft_config is None:
        return model
    from peft import get_peft_config, get_peft_model  # optional, and who has such a checkpoint needs it

    adapter = dict(metadata.peft_config) if trust_remote_code else without_code(metadata.peft_config)
    adapted: Any = get_peft_model(model, get_peft_config(adapter))
    return adapted


def _entry(content: dict[str, Any], owner: type) -> dict[str, Any]:
    return {"file_extension": _JSON, "content": content, "class": f"{owner.__module__}.{owner.__qualname__}"}


def _tokenizer_files(tokenizer: "PreTrainedTokenizerBase") -> dict[str, dict[str, Any]]:
    # Several templates would become a folder, for which checkpoints have no form; in the configuration they have one.
    as_files = not isinstance(getattr(tokenizer, "chat_template", None), dict)
    with tempfile.TemporaryDirectory(prefix="composer-tokenizer-") as folder:
        tokenizer.save_pretrained(folder, save_jinja_files=as_files)
        return encode_files(Path(folder))


def _original_class(model: Any) -> type:
    """Return the class of a model as it was written: sharding puts another one before it."""
    return next(base for base in type(model).__mro__ if not base.__module__.startswith("torch."))
