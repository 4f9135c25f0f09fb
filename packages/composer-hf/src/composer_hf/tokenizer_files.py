"""Tokenizer files, as stored in a checkpoint and in a folder."""

import json
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path, PurePosixPath
from typing import Any, Final

from composer_checkpoint import IncompatibleCheckpointError, UnsafeCheckpointError

log = getLogger(__name__)

_CODE: Final = ".py"
_TEXTS: Final = (_CODE, ".jinja")
_KINDS: Final = (".json", ".txt", ".model", *_TEXTS)
_CONFIG_NAME: Final = "tokenizer_config.json"
# Files of the model in the same folder, which a tokenizer's file of such a name would overwrite.
_MODELS_OWN: Final = ("config.json", "generation_config.json", "adapter_config.json", ".index.json")


def encode_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the checkpoint's form of the files that `tokenizer.save_pretrained` wrote.

    Returns:
        The `file_extension` and `content` of each file, by its name: the values of JSON, a list of lines of `.txt`, the
            text of code and templates, and the bytes of `.model`.
    """
    return {path.name: _encode(path) for path in sorted(folder.iterdir()) if path.is_file()}


def decode_files(saved: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a checkpoint's tokenizer by name, for checkpoints of any release."""
    files: dict[str, bytes] = {}
    for key, entry in saved.items():
        extension = entry.get("file_extension") if isinstance(entry, Mapping) else None
        if extension not in _KINDS or "content" not in entry:
            raise IncompatibleCheckpointError(
                f"the checkpoint's tokenizer has a file {key!r:.200} of the kind {extension!r:.200}, and known are "
                f"{', '.join(_KINDS)}. Give the tokenizer yourself."
            )
        # Old releases of Composer omitted the extension from the name.
        name = key if str(key).endswith(extension) else f"{key}{extension}"
        if name in _MODELS_OWN or name.endswith(_MODELS_OWN[-1]):
            raise UnsafeCheckpointError(
                f"the checkpoint's tokenizer has a file {name!r:.200}, which describes models and not tokenizers: "
                f"it would replace the one of the model. Nothing was written. Give the tokenizer yourself."
            )
        # Windows separators and drives are rejected on every system, since a checkpoint may be converted on Windows.
        if name != PurePosixPath(name).name or name in (".", "..") or "\\" in name or "\0" in name or ":" in name:
            raise UnsafeCheckpointError(
                f"the checkpoint's tokenizer has a file {name!r:.200}, whose name is not a plain one: it would be "
                f"written outside its folder. Nothing was written. Give the tokenizer yourself."
            )
        files[name] = _decode(name, extension, entry["content"])
    return files


def for_any_release(files: Mapping[str, bytes], *, trust_remote_code: bool = False) -> dict[str, bytes]:
    """Return tokenizer files that transformers 4 and 5 both load, without code unless it is trusted.

    Transformers 5 has another name for the class of fast tokenizers, and for the additional special tokens.
    """
    kept = {name: data for name, data in files.items() if trust_remote_code or not name.endswith(_CODE)}
    if _CONFIG_NAME in kept:
        config: Any = json.loads(kept[_CONFIG_NAME])
        if not isinstance(config, dict):
            raise IncompatibleCheckpointError(
                f"the checkpoint's {_CONFIG_NAME} is a JSON {type(config).__name__}, and an object is expected. Give "
                f"the tokenizer yourself."
            )
        # Fields of transformers 5, in the terms of transformers 4, which 5 reads as well.
        config.pop("backend", None)
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        if not trust_remote_code:
            config.pop("auto_map", None)
        kept[_CONFIG_NAME] = as_json(config)
    return kept


def as_json(values: Any) -> bytes:
    """Return values as the bytes of a JSON file."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _encode(path: Path) -> dict[str, Any]:
    extension = path.suffix
    content: Any
    if extension == ".json":
        content = json.loads(path.read_bytes())
    elif extension == ".txt":
        content = path.read_bytes().decode().removesuffix("\n").split("\n")  # splitlines would split inside tokens
    elif extension in _TEXTS:
        content = path.read_bytes().decode()
    elif extension == ".model":
        content = path.read_bytes()
    else:
        raise ValueError(
            f"the tokenizer saves a file {path.name!r}, which checkpoints cannot store: they accept "
            f"{', '.join(_KINDS)}. Give the model no tokenizer, and save the tokenizer separately."
        )
    return {"file_extension": extension, "content": content}


def _decode(name: str, extension: str, content: Any) -> bytes:
    if extension == ".json":
        return as_json(content)
    if extension == ".txt" and isinstance(content, list):
        return "".join(f"{str(line).removesuffix(chr(10))}\n" for line in content).encode()
    if extension in _TEXTS and isinstance(content, str):
        return content.encode()
    if extension == ".model" and isinstance(content, bytes):
        return content
    raise IncompatibleCheckpointError(
        f"the checkpoint's tokenizer has {name!r:.200} as a {type(content).__name__}, which is not the content of such "
        f"a file. Give the tokenizer yourself."
    )


def fit_vocabulary(model: Any, tokenizer: Any, *, may_resize: bool) -> None:
    """Raise if a tokenizer has more tokens than the model, or resize the model's embeddings if that is allowed."""
    num_embeddings, num_tokens = getattr(model.config, "vocab_size", None), len(tokenizer)
    if num_embeddings is None:  # some configurations lack it
        num_embeddings = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if num_embeddings is None or num_embeddings == num_tokens:
        return
    if num_embeddings > num_tokens:
        log.info(
            "The number of tokens in the tokenizer is less than the number of tokens in the model: %d and %d. "
            "Embeddings are left as they are.",
            num_tokens,
            num_embeddings,
        )
        return
    message = (
        f"The number of tokens in the tokenizer is greater than the number of tokens in the model: {num_tokens} and "
        f"{num_embeddings}."
    )
    if not may_resize:
        raise ValueError(
            f"{message} Tokens without an embedding would fail in the middle of training. Resize the embeddings with "
            f"model.resize_token_embeddings({num_tokens}), or pass allow_embedding_resizing=True."
        )
    log.warning("%s The embeddings are resized.", message)
    model.resize_token_embeddings(num_tokens)
