"""Configuration and tokenizer of a Hugging Face folder, read without importing transformers."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_checkpoint import CorruptCheckpointError, IncompatibleCheckpointError
from composer_checkpoint.tensors import TensorSource
from composer_ckpt.options import ConvertOptions
from composer_ckpt.output import UsageError
from composer_hf.metadata import HuggingFaceMetadata, MissingMetadataError
from composer_hf.tokenizer_files import decode_files, encode_files

_MAX_JSON_BYTES = 64 << 20
_TOKENIZER_FILES = frozenset(
    {
        *("added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "sentencepiece.bpe.model"),
        *("special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
        *("vocab.json", "vocab.txt"),
    }
)
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def describe_folder(folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> dict[str, Any] | None:
    """Return a folder's configurations and tokenizer as under `state/integrations/huggingface`, `None` without any."""
    root = Path(folder)
    config, adapter = _object(root / "config.json"), _object(root / "adapter_config.json")
    generation = _object(root / "generation_config.json")
    if config is None and adapter is None:
        return None
    config = config or {}
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    model: dict[str, Any] = {"config": _entry(config, f"transformers.{name}" if name else "")}
    if generation is not None:
        model["generation_config"] = _entry(generation, "transformers.GenerationConfig")
    if adapter is not None:
        model["peft_config"] = _entry(adapter, "peft.LoraConfig")
    return {"model": model, "tokenizer": tokenizer_of(root, trust_remote_code=trust_remote_code)}


def tokenizer_of(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return a folder's tokenizer in the form of checkpoints; empty without one."""
    code = {path.name for path in folder.glob("tokenization_*.py")} if trust_remote_code else set[str]()
    present = [folder / name for name in sorted(_TOKENIZER_FILES | code) if (folder / name).is_file()]
    # Links instead of copies: tokenizer files may be large, and `encode_files` reads a whole folder.
    with tempfile.TemporaryDirectory(prefix="composer-ckpt-") as place:
        for path in present:
            os.symlink(path.resolve(), Path(place, path.name))
        return encode_files(Path(place))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CorruptCheckpointError(
            f"{path} has {path.stat().st_size} bytes, more than any configuration. Check the file."
        )
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not JSON: {error!s:.200}. Restore the file.") from error


def is_weight_file(name: str) -> bool:
    """Return whether a file of a folder contains weights, or is the index of such files."""
    return name.endswith(_WEIGHTS)


def _object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    value = read_json(path)
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path} is a JSON {type(value).__name__}, and an object is expected.")
    return value


def _entry(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"file_extension": ".json", "content": dict(content), "class": name}


def saved_description(source: TensorSource, *, trust_remote_code: bool = False) -> Mapping[str, Any] | None:
    """Return the description in the checkpoint, or of its Hugging Face folder, if there is one."""
    integrations = source.state.get("integrations")
    saved = integrations.get("huggingface") if isinstance(integrations, Mapping) else None
    if not saved and source.format == "hf":
        saved = describe_folder(source.path, trust_remote_code=trust_remote_code)
    return saved if isinstance(saved, Mapping) and saved else None


def metadata_of(source: TensorSource, options: ConvertOptions) -> HuggingFaceMetadata:
    """Return the model's metadata, with `--config`, `--config-override` and `--tokenizer` applied."""
    saved = saved_description(source, trust_remote_code=options.trust_remote_code)
    if saved is not None:
        metadata = HuggingFaceMetadata.from_saved(saved, options.source)
        if source.format == "hf" and metadata.peft_config is not None and not metadata.config:
            metadata = replace(metadata, model_class="")  # an adapter folder does not name the class of its base
    elif options.config is not None:
        metadata = HuggingFaceMetadata({})
    else:
        raise MissingMetadataError(
            f"{options.source} does not identify its Hugging Face model: it has no "
            f"state/integrations/huggingface. Give --config PATH with the model's config.json, and --tokenizer PATH."
        )
    if options.config is not None:
        # The class follows from the new configuration.
        metadata = replace(metadata, config=_config_at(Path(options.config)), model_class="")
    metadata = replace(metadata, config=_overridden(metadata.config, options.config_override))
    if not metadata.model_class and (metadata.config or metadata.peft_config is None):
        metadata = replace(metadata, model_class=_class_of(metadata.config, options.config or options.source))
    if options.tokenizer is not None:
        tokenizer = tokenizer_of(Path(options.tokenizer), trust_remote_code=options.trust_remote_code)
        if not tokenizer:
            raise UsageError(f"--tokenizer {options.tokenizer!r} is not a folder with a tokenizer's files.")
        metadata = replace(metadata, tokenizer_files=decode_files(tokenizer))
    return metadata


def _config_at(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"--config {str(path)!r} is not a file, nor a folder with a config.json. Check the path.")
    config = read_json(file)
    if not isinstance(config, dict):
        raise UsageError(f"--config {str(path)!r} is a JSON {type(config).__name__}, and an object is expected.")
    return config


def _class_of(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return f"transformers.{names[0]}"
    raise IncompatibleCheckpointError(
        f"{source}: the configuration does not name the model's class. Add it, such as --config-override "
        f"'architectures=[\"LlamaForCausalLM\"]'."
    )


def _overridden(config: Mapping[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """Return the configuration with `KEY=VALUE` overrides; dots in a key separate nested keys."""
    result: dict[str, Any] = dict(config)
    for text in overrides or ():
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UsageError(f"--config-override {text!r} is not KEY=VALUE.")
        here = result
        *outer, last = path.split(".")
        for key in outer:
            inner = here.get(key)
            here[key] = here = dict(inner) if isinstance(inner, Mapping) else {}  # a copy: the input is not changed
        try:
            here[last] = json.loads(value)
        except ValueError:
            here[last] = value  # a string without quotes
    return result
