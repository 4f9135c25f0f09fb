"""Which Hugging Face model a checkpoint is of, by what it says itself and by what the command line says."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_checkpoint import IncompatibleCheckpointError
from composer_checkpoint.tensors import TensorSource
from composer_ckpt.folders import describe_folder, read_json, tokenizer_of
from composer_ckpt.outcomes import UsageError
from composer_hf.metadata import HuggingFaceMetadata, MissingMetadataError
from composer_hf.tokenizer_files import decode_files

__all__ = ["metadata_of", "saved_description"]


def saved_description(source: TensorSource, options: argparse.Namespace) -> Mapping[str, Any] | None:
    """Return what the checkpoint says under `state/integrations/huggingface`, or what lies in its folder."""
    integrations = source.state.get("integrations")
    saved = integrations.get("huggingface") if isinstance(integrations, Mapping) else None
    if not saved and source.format == "hf":
        saved = describe_folder(source.path, trust_remote_code=options.trust_remote_code)
    return saved if isinstance(saved, Mapping) and saved else None


def metadata_of(source: TensorSource, options: argparse.Namespace) -> HuggingFaceMetadata:
    """Return the model's description, after what `--config`, `--config-override` and `--tokenizer` say.

    Raises:
        MissingMetadataError: If neither the checkpoint nor the command line says which model it is.
    """
    saved = saved_description(source, options)
    if saved is not None:
        metadata = HuggingFaceMetadata.from_saved(saved, options.source)
        if source.format == "hf" and metadata.peft_config is not None and not metadata.config:
            metadata = replace(metadata, model_class="")
    elif options.config is not None:
        metadata = HuggingFaceMetadata({})
    else:
        raise MissingMetadataError(
            f"{options.source} does not say which Hugging Face model it is of: it has no "
            f"state/integrations/huggingface. Give --config PATH with the model's config.json, and --tokenizer PATH."
        )
    if options.config is not None:
        metadata = replace(metadata, config=_config_at(Path(options.config)), model_class="")
    metadata = replace(metadata, config=_overridden(metadata.config, options.config_override))
    if not metadata.model_class and (metadata.config or metadata.peft_config is None):
        metadata = replace(metadata, model_class=_class_of(metadata.config, options.config or options.source))
    if options.tokenizer is not None:
        metadata = replace(metadata, tokenizer_files=_tokenizer_at(Path(options.tokenizer), options))
    return metadata


def _tokenizer_at(folder: Path, options: argparse.Namespace) -> Mapping[str, bytes]:
    saved = tokenizer_of(folder, trust_remote_code=options.trust_remote_code)
    if not saved:
        raise UsageError(f"--tokenizer {str(folder)!r} is no folder with a tokenizer's files. Check the path.")
    return decode_files(saved)


def _config_at(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"--config {str(path)!r} is no file, and no folder with a config.json. Check the path.")
    config = read_json(file)
    if not isinstance(config, dict):
        raise UsageError(f"--config {str(path)!r} is a JSON {type(config).__name__}, and an object is expected.")
    return config


def _class_of(config: Mapping[str, Any], source: str) -> str:
    """Return the class by the name in a configuration."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return f"transformers.{names[0]}"
    raise IncompatibleCheckpointError(
        f"{source}: the configuration does not name the model's class. Add it, such as --config-override "
        f"'architectures=[\"LlamaForCausalLM\"]'."
    )


def _overridden(config: Mapping[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """Return the configuration with `KEY=VALUE`s, where a key with dots leads into what is nested."""
    result: dict[str, Any] = dict(config)
    for text in overrides or ():
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UsageError(f"--config-override {text!r} is not KEY=VALUE.")
        here = result
        *outer, last = path.split(".")
        for key in outer:
            inner = here.get(key)
            here[key] = here = dict(inner) if isinstance(inner, Mapping) else {}
        try:
            here[last] = json.loads(value)
        except ValueError:
            here[last] = value  # a text without quotes
    return result
