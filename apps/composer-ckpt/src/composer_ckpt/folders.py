"""What lies beside the weights in a Hugging Face folder, read without importing transformers."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_checkpoint import CorruptCheckpointError
from composer_hf.tokenizer_files import encode_files

__all__ = ["describe_folder", "is_weight_file", "read_json", "tokenizer_of"]

_MAX_JSON_BYTES = 64 << 20
_TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def describe_folder(folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> dict[str, Any] | None:
    """Return what a checkpoint would hold under `state/integrations/huggingface` of a folder's model.

    Args:
        folder: A Hugging Face folder.
        trust_remote_code: Whether code beside the tokenizer is taken along.

    Returns:
        The description, `None` if there is neither a `config.json` nor an `adapter_config.json`.

    Raises:
        CorruptCheckpointError: If one of them is no JSON object.
    """
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
    """Return a folder's tokenizer in the form that checkpoints have; empty if it has none."""
    code = {path.name for path in folder.glob("tokenization_*.py")} if trust_remote_code else set[str]()
    present = [folder / name for name in sorted(_TOKENIZER_FILES | code) if (folder / name).is_file()]
    with tempfile.TemporaryDirectory(prefix="composer-ckpt-") as place:
        for path in present:
            os.symlink(path.resolve(), Path(place, path.name))
        return encode_files(Path(place))


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        CorruptCheckpointError: If it is no JSON, or larger than any such file.
    """
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CorruptCheckpointError(
            f"{path} has {path.stat().st_size} bytes, more than any configuration. Look at it."
        )
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not JSON: {error!s:.200}. Bring the file back.") from error


def is_weight_file(name: str) -> bool:
    """Say whether a file of a folder has weights, or is an index of such files."""
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
