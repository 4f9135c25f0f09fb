"""A folder that `from_pretrained` reads, which is there whole or not at all."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any, Final

import torch

from composer_checkpoint import write_atomically
from composer_hf.adapters import changes_base
from composer_hf.code_settings import without_code
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.tokenizer_files import as_json, for_any_release

__all__ = ["pretrained_folder", "readable_config", "write_description", "write_tokenizer"]

log = getLogger(__name__)

ADAPTER_CONFIG_NAME: Final = "adapter_config.json"


@contextmanager
def pretrained_folder(
    path: str | os.PathLike[str],
    metadata: HuggingFaceMetadata,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    need_bytes: int | None = None,
) -> Iterator[Path]:
    """Yield a folder with all that describes a model, for the body to write its weights to.

    At the end all is flushed to the disk and gets its name in one step. After an exception nothing is left.

    Args:
        path: The folder's name.
        metadata: What a checkpoint says of the model.
        dtype: What most of the weights are, for `config.json`.
        overwrite: Whether a model in a folder of this name may be replaced. Files that are not of one stay.
        trust_remote_code: Whether code that came with the checkpoint is written, too.
        need_bytes: How much will be written, to refuse before anything is if it cannot fit.

    Raises:
        CheckpointConflictError: If the folder exists, and `overwrite` is false; it is a `FileExistsError`.
        StorageError: If the disk is full, read-only or broken; it is an `OSError`.

    Example:
        >>> import tempfile
        >>> metadata = HuggingFaceMetadata({"model_type": "gpt2"}, "transformers.GPT2LMHeadModel")
        >>> path = Path(tempfile.mkdtemp()) / "out"
        >>> with pretrained_folder(path, metadata) as unfinished:
        ...     _ = (unfinished / "model.safetensors").write_bytes(b"")
        >>> sorted(os.listdir(path))
        ['config.json', 'model.safetensors']
    """
    with write_atomically(
        path, overwrite=overwrite, folder=True, need_bytes=need_bytes, keep_others=True
    ) as unfinished:
        write_description(unfinished, metadata, dtype=dtype, trust_remote_code=trust_remote_code)
        yield unfinished


def write_description(
    folder: Path,
    metadata: HuggingFaceMetadata,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write the configurations and the tokenizer's files of a model to a folder.

    Args:
        folder: Is there.
        metadata: What a checkpoint says of the model. With adapters, their configuration is written, and the model's is
            not: `peft` takes it from the base model.
        dtype: As in `pretrained_folder`.
        trust_remote_code: Whether code that came with the checkpoint is written, too.
    """
    if metadata.peft_config is not None:
        adapter = dict(metadata.peft_config) if trust_remote_code else without_code(metadata.peft_config)
        if changes_base(adapter):
            adapter["init_lora_weights"] = True  # the changed base is among the weights, and is not made again
        (folder / ADAPTER_CONFIG_NAME).write_bytes(as_json(adapter))
    else:
        config = readable_config(metadata, dtype=dtype, trust_remote_code=trust_remote_code)
        if alibi := config.get("composer_alibi"):
            log.warning(
                "The model has ALiBi (composer_alibi=%r in config.json), which from_pretrained does not know of: who "
                "loads the folder has to call composer.functional.apply_alibi(model, max_sequence_length=%s).",
                *(alibi, alibi.get("max_sequence_length") if isinstance(alibi, Mapping) else "..."),
            )
        (folder / "config.json").write_bytes(as_json(config))
        if metadata.generation_config:
            (folder / "generation_config.json").write_bytes(as_json(dict(metadata.generation_config)))
    write_tokenizer(folder, metadata, trust_remote_code=trust_remote_code)


def write_tokenizer(folder: Path, metadata: HuggingFaceMetadata, *, trust_remote_code: bool = False) -> None:
    """Write the tokenizer's files to a folder, under plain names, such that transformers 4 and 5 load them."""
    for name, data in for_any_release(metadata.tokenizer_files, trust_remote_code=trust_remote_code).items():
        (folder / name).write_bytes(data)


def readable_config(
    metadata: HuggingFaceMetadata, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return the values of `config.json` such that transformers 4 and 5 read them alike."""
    config = dict(metadata.config) if trust_remote_code else without_code(metadata.config)
    config.pop("_name_or_path", None)  # where somebody else had the model
    if not config.get("architectures") and metadata.model_class:
        config["architectures"] = [metadata.model_class.rpartition(".")[2]]
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    _add_older_rope(config)
    return config


def _add_older_rope(config: dict[str, Any]) -> None:
    """Say also as transformers 4 reads it what 5 keeps in `rope_parameters`."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        return  # none, or one for each kind of layer, of models that transformers 4 does not know
    config.setdefault("rope_theta", rope["rope_theta"])
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    config.setdefault("rope_scaling", None if scaling.get("rope_type") in (None, "default") else scaling)
