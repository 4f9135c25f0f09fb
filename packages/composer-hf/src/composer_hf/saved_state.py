"""Conversion between a Hugging Face model and its description in a checkpoint, without the weights."""

import json
import random
import string
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from composer_checkpoint.tensors import open_checkpoint
from composer_hf.adapters import adapter_of, is_peft_model, maybe_get_underlying_model, peft_config_values
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import build_config, build_model, find_class, without_code
from composer_hf.published_weights import plan_weights, published_name, tied_names
from composer_hf.publishing import local_checkpoint, on_meta, write_tokenizer
from composer_hf.tokenizer_files import encode_files

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_JSON: Final = ".json"


def describe(
    model: Any, tokenizer: "PreTrainedTokenizerBase | None", trained_beside_adapter: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the description of a model and its tokenizer for checkpoints, as values that load without running code.

    Returns:
        The layout of Composer's checkpoints under `state/integrations/huggingface`, extended by
            `generation_config` and `trained_beside_adapter`.
    """
    inner = maybe_get_underlying_model(model)
    config: dict[str, Any] = json.loads(inner.config.to_json_string(use_diff=False))
    if not config.get("architectures"):
        # transformers sets this only in `save_pretrained`.
        config["architectures"] = [_original_class(inner).__name__]
    described: dict[str, Any] = {"config": _entry(config, _original_class(inner))}
    if (generation := getattr(inner, "generation_config", None)) is not None:
        described["generation_config"] = _entry(json.loads(generation.to_json_string()), type(generation))
    if is_peft_model(model):
        peft_config = model.peft_config[adapter_of(model)]
        described["peft_config"] = _entry(peft_config_values(peft_config), type(peft_config))
        described["trained_beside_adapter"] = sorted(trained_beside_adapter)
    files: dict[str, Any] = {}
    if tokenizer is not None:
        # Several templates would be saved as a folder, which checkpoints cannot hold: they stay in the configuration.
        as_files = not isinstance(getattr(tokenizer, "chat_template", None), dict)
        with tempfile.TemporaryDirectory(prefix="composer-tokenizer-") as folder:
            tokenizer.save_pretrained(folder, save_jinja_files=as_files)
            files = encode_files(Path(folder))
    return {"model": described, "tokenizer": files}


def get_hf_config_from_composer_state_dict(
    state_dict: Mapping[str, Any],
    config_overrides: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    allow_network: bool = False,
) -> "PretrainedConfig":
    """Return the configuration of the Hugging Face model in a checkpoint.

    Args:
        state_dict: Content of the checkpoint.
        config_overrides: Values that replace those of the checkpoint.
        trust_remote_code: Whether to run code from the model's origin.
        allow_network: Whether to look on the Hub for an architecture that transformers does not know.

    Raises:
        MissingMetadataError: If the checkpoint is not of a Hugging Face model.
        IncompatibleCheckpointError: If transformers does not know the architecture.
    """
    metadata = HuggingFaceMetadata.from_checkpoint(state_dict)
    return build_config(metadata, config_overrides, trust_remote_code=trust_remote_code, allow_network=allow_network)


def get_peft_config_from_composer_state_dict(state_dict: Mapping[str, Any]) -> "PeftConfig | None":
    """Return the configuration of the adapter in a checkpoint, or `None` without one."""
    metadata = HuggingFaceMetadata.from_checkpoint(state_dict)
    if metadata.peft_config is None:
        return None
    from peft import get_peft_config  # optional; needed only for adapters

    return get_peft_config(without_code(metadata.peft_config))


def load_tokenizer(
    hf_state: Mapping[str, Any], trust_remote_code: bool = False, tokenizer_save_dir: str | None = None
) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer in a checkpoint, or `None` without one.

    Args:
        hf_state: The checkpoint's value under `state/integrations/huggingface`.
        trust_remote_code: Whether to write and run code among the tokenizer's files.
        tokenizer_save_dir: Folder for the files, which are kept because some tokenizers read them later. Default: a
            new folder in the current one.

    Raises:
        UnsafeCheckpointError: If the name of a file leads out of that folder.
    """
    if not hf_state.get("tokenizer"):
        return None
    from transformers import AutoTokenizer  # slow to load

    metadata = HuggingFaceMetadata.from_saved(hf_state)
    letters = string.ascii_lowercase + string.digits
    # The global generator is seeded for training, so drawing from it would change the results and repeat names.
    name = tokenizer_save_dir or f"tokenizer-save-dir-{''.join(random.SystemRandom().choices(letters, k=6))}"
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, metadata, trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    settings = json.loads(metadata.tokenizer_files.get("tokenizer_config.json", b"{}"))
    tokenizer.name_or_path = settings.get("name_or_path") or ""  # instead of the folder above
    return tokenizer


def load_model(
    hf_state: Mapping[str, Any],
    loaded_state_dict: Mapping[str, Any] | None = None,
    model_instantiation_class: type | str | None = None,
    model_config_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> "PreTrainedModel":
    """Return the model that a checkpoint describes, with random weights: the Trainer loads the saved ones.

    Args:
        hf_state: The checkpoint's value under `state/integrations/huggingface`.
        loaded_state_dict: The checkpoint's content; unused.
        model_instantiation_class: Replaces the model's class: a class, an auto class, or the full name of one.
        model_config_kwargs: Values that replace those of the configuration.
        trust_remote_code: Whether to import a class outside of transformers that the checkpoint names.

    Raises:
        ValueError: If the class cannot be imported.
        AttributeError: If the class is not a model class.
    """
    metadata = HuggingFaceMetadata.from_saved(hf_state)
    config = build_config(metadata, model_config_kwargs, trust_remote_code=trust_remote_code)
    model_class = model_instantiation_class or metadata.model_class
    if isinstance(model_class, str):  # trusted if chosen by the caller, not by the checkpoint
        is_trusted = trust_remote_code or model_instantiation_class is not None
        model_class = find_class(model_class, trust_remote_code=is_trusted)
    model = build_model(model_class, config)
    if metadata.peft_config is None:
        return model
    from peft import get_peft_config, get_peft_model  # optional; needed only for adapters

    adapter = dict(metadata.peft_config) if trust_remote_code else without_code(metadata.peft_config)
    adapted: Any = get_peft_model(model, get_peft_config(adapter))
    return adapted


def _entry(content: dict[str, Any], owner: type) -> dict[str, Any]:
    return {"file_extension": _JSON, "content": content, "class": f"{owner.__module__}.{owner.__qualname__}"}


def _original_class(model: Any) -> type:
    """Return the class of a model before FSDP, which replaces it with a subclass of its own."""
    return next(base for base in type(model).__mro__ if not base.__module__.startswith("torch."))


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

    By default the weights are random, for a Trainer that loads the checkpoint through its `load_path`.

    Args:
        checkpoint_path: A file or folder that a Trainer saved, or a URI in an object store.
        model_instantiation_class: Replaces the model's class: a class, an auto class, or the full name of one, such as
            `'transformers.AutoModelForSequenceClassification'`.
        model_config_kwargs: Values that replace those of the configuration, such as `{'num_labels': 3}`.
        local_checkpoint_save_location: Path at which to keep a downloaded checkpoint, or to link to a local one.
        trust_remote_code: Whether to import code that came with the checkpoint.
        load_weights: Whether to load the checkpoint's weights.

    Returns:
        The model, and the tokenizer if the checkpoint has one.

    Raises:
        MissingMetadataError: If the checkpoint is not of a Hugging Face model.
        ValueError, AttributeError: If the class cannot be imported, or is not a model class.
        CheckpointError: If the checkpoint is damaged, unsafe, or of a model that transformers does not know.
    """
    with local_checkpoint(checkpoint_path, local_checkpoint_save_location) as path, open_checkpoint(path) as source:
        metadata = HuggingFaceMetadata.from_checkpoint(source.tree, checkpoint_path)
        saved = source.state["integrations"]["huggingface"]
        model = load_model(saved, None, model_instantiation_class, model_config_kwargs, trust_remote_code)
        if load_weights:
            stored = source.weights
            pieces = [] if is_peft_model(model) else plan_weights(on_meta(stored), metadata)
            read = {name: tensor.read() for name, tensor in stored.items()}
            published = {k: v for piece in pieces for k, v in piece.convert(read).items()}
            model = _with_weights(model, {published_name(name): weight for name, weight in read.items()}, published)
        tokenizer = load_tokenizer(saved, trust_remote_code)
    return model, tokenizer


def _with_weights(model: Any, weights: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> Any:
    """Load weights named as in memory in this release of transformers, or else those named as in a folder."""
    if is_peft_model(model):
        model.load_state_dict(weights, strict=False)  # the checkpoint need not have the base model's weights
        return model
    if weights.keys() <= model.state_dict().keys():
        ties = tied_names(model)
        model.load_state_dict(weights, strict=not ties)  # tied weights may be present under one name only
        model.tie_weights()
        return model
    # `from_pretrained` fuses or splits weights as this release of transformers requires.
    return type(model).from_pretrained(None, config=model.config, state_dict=dict(published))
