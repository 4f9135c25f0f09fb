"""Conversion of a Composer checkpoint to a Hugging Face folder, without building the model in memory."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from composer_checkpoint import IncompatibleCheckpointError, verify, write_atomically
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.tensors import StoredTensor, open_checkpoint
from composer_hf.adapters import changes_base
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import without_code
from composer_hf.model_traits import recorded_surgery
from composer_hf.published_weights import plan_weights
from composer_hf.tokenizer_files import as_json, for_any_release
from composer_hf.weight_files import (
    FORMATS,
    Format,
    check_ties,
    main_dtype,
    parse_size,
    plan_files,
    published_tensors,
    total_bytes,
    write_files,
)

log = getLogger(__name__)

ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def write_huggingface_pretrained_from_composer_checkpoint(
    checkpoint_path: Path | str,
    output_folder: Path | str,
    local_checkpoint_save_location: Path | str | None = None,
    *,
    format: Format = "safetensors",
    max_shard_size: int | str = "5GB",
    precision: str | torch.dtype | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Convert a checkpoint of a `HuggingFaceModel` to a Hugging Face folder, written completely or not at all.

    The folder has the configurations, the tokenizer's files and the weights, bit for bit unless `precision` is given.
    Transformers 4 and 5 load it. For a model with an adapter it has only the adapter, which peft loads. The checkpoint
    is verified against its hashes, and no code in it is run. At most the weights of one file are in memory.

    Args:
        checkpoint_path: A file or folder that a Trainer saved, or a URI in an object store.
        output_folder: The folder to write.
        local_checkpoint_save_location: Path at which to keep a downloaded checkpoint, or to link to a local one.
        format: Format of the weights: `'safetensors'`, `'bin'` for `pytorch_model.bin`, or `'both'`.
        max_shard_size: Maximum size of a file, such as `'5GB'`.
        precision: `'float32'`, `'float16'` or `'bfloat16'`. Default: as in the checkpoint.
        overwrite: Whether to replace an existing folder. An empty one is always replaced.
        trust_remote_code: Whether to import and write code that came with the checkpoint.

    Returns:
        The folder.

    Raises:
        CheckpointConflictError: If the folder exists. This is also a `FileExistsError`.
        MissingMetadataError: If the checkpoint is not of a Hugging Face model. This is also a `RuntimeError`.
        UnfittingWeightsError: If weights are missing, or not in the model.
        CheckpointError: If it is damaged, unsafe, or of a model that transformers does not know, or the disk is full.
    """
    max_shard_bytes, dtype = parse_size(max_shard_size), as_dtype(precision)
    if format not in FORMATS:
        raise ValueError(f"format={format!r} must be one of {', '.join(map(repr, FORMATS))}.")
    output_folder = Path(output_folder)
    overwrite = overwrite or (output_folder.is_dir() and not any(output_folder.iterdir()))
    with local_checkpoint(checkpoint_path, local_checkpoint_save_location) as path:
        verify(path)  # before any of its content is parsed
        with open_checkpoint(path) as source:
            metadata = HuggingFaceMetadata.from_checkpoint(source.tree, checkpoint_path)
            if not source.weights:
                raise IncompatibleCheckpointError(
                    f"{checkpoint_path} has no weights under state/model. Name another checkpoint."
                )
            write_pretrained(
                output_folder,
                source.weights,
                metadata,
                max_shard_bytes=max_shard_bytes,
                format=format,
                dtype=dtype,
                overwrite=overwrite,
                trust_remote_code=trust_remote_code,
            )
    return output_folder


def write_pretrained(
    path: str | os.PathLike[str],
    weights: Mapping[str, StoredTensor],
    metadata: HuggingFaceMetadata,
    *,
    max_shard_bytes: int,
    format: Format,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    add_contents: Callable[[Path], None] | None = None,
) -> None:
    """Write a folder that `from_pretrained` reads, completely or not at all.

    The other arguments are those of `write_huggingface_pretrained_from_composer_checkpoint`; `add_contents` is called
    with the folder before it is renamed.
    """
    # Plan and compare everything first, so that errors come before anything is written.
    pieces = plan_weights(on_meta(weights), metadata, trust_remote_code=trust_remote_code)
    tensors = published_tensors(pieces, weights, dtype)
    is_adapter = metadata.peft_config is not None
    kinds = [kind for kind in ("safetensors", "bin") if format in (kind, "both")]
    plans = {kind: plan_files(tensors, max_shard_bytes, format=kind, is_adapter=is_adapter) for kind in kinds}
    check_ties(pieces, weights)
    with pretrained_folder(
        path,
        metadata,
        dtype=main_dtype(plans[kinds[0]]),
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        need_bytes=sum(map(total_bytes, plans.values())),
    ) as folder:
        for kind, files in plans.items():
            write_files(folder, files, format=kind)
        if add_contents is not None:
            add_contents(folder)


@contextmanager
def local_checkpoint(path: Path | str, save_location: Path | str | None = None) -> Iterator[str]:
    """Yield the local path of a checkpoint that may be in an object store. A download is deleted without a location."""
    if save_location is not None:
        get_file(path, save_location, progress_bar=False)
        yield os.fspath(save_location)
        return
    if os.path.exists(path):
        yield os.fspath(path)
        return
    with tempfile.TemporaryDirectory(prefix="composer-hf-") as folder:
        destination = os.path.join(folder, os.path.basename(os.fspath(path)).removesuffix(".symlink"))
        get_file(path, destination, progress_bar=False)
        yield destination


def on_meta(weights: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return meta tensors with the dtypes and shapes of stored weights."""
    return {name: torch.empty(stored.shape, dtype=stored.dtype, device="meta") for name, stored in weights.items()}


def as_dtype(precision: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype with the name of a precision.

    Raises:
        ValueError: If the name is unknown.
    """
    if precision is None or isinstance(precision, torch.dtype):
        return precision
    name = str(precision).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


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
    """Yield a folder with a model's configurations and tokenizer, to which the body writes the weights.

    At exit, everything is flushed to the disk and renamed in one step. After an exception nothing remains. `dtype` is
    written to `config.json`. With `overwrite`, files that are not part of a model are kept.

    Raises:
        CheckpointConflictError: If the folder exists and `overwrite` is false. This is also a `FileExistsError`.
        StorageError: If the disk is full, read-only or broken. This is also an `OSError`.

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
    """Write a model's configurations and tokenizer files to a folder."""
    if metadata.peft_config is not None:
        adapter = dict(metadata.peft_config) if trust_remote_code else without_code(metadata.peft_config)
        if changes_base(adapter):
            adapter["init_lora_weights"] = True  # the weights include the changed base, which must not change again
        (folder / ADAPTER_CONFIG_NAME).write_bytes(as_json(adapter))
    else:
        config = readable_config(metadata, dtype=dtype, trust_remote_code=trust_remote_code)
        for surgery in recorded_surgery(config):
            log.warning(
                "The model has %s, which from_pretrained does not apply: %s.",
                surgery.method,
                f"code that loads the folder has to call composer.functional.{surgery.call}"
                if surgery.call
                else "the folder computes something else, so load the Composer checkpoint instead",
            )
        (folder / "config.json").write_bytes(as_json(config))
        if metadata.generation_config:
            (folder / "generation_config.json").write_bytes(as_json(dict(metadata.generation_config)))
    write_tokenizer(folder, metadata, trust_remote_code=trust_remote_code)


def write_tokenizer(folder: Path, metadata: HuggingFaceMetadata, *, trust_remote_code: bool = False) -> None:
    """Write the tokenizer's files to a folder under their base names, readable by transformers 4 and 5."""
    for name, data in for_any_release(metadata.tokenizer_files, trust_remote_code=trust_remote_code).items():
        (folder / name).write_bytes(data)


def readable_config(
    metadata: HuggingFaceMetadata, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return the values of `config.json`, in a form that transformers 4 and 5 read in the same way."""
    config = dict(metadata.config) if trust_remote_code else without_code(metadata.config)
    config.pop("_name_or_path", None)  # a path on the machine that trained the model
    if not config.get("architectures") and metadata.model_class:
        config["architectures"] = [metadata.model_class.rpartition(".")[2]]
    if dtype is not None:
        config.pop("torch_dtype", None)  # the older name of `dtype`
        config["dtype"] = str(dtype).removeprefix("torch.")
    _add_older_rope(config)
    return config


def _add_older_rope(config: dict[str, Any]) -> None:
    """Add the fields of transformers 4 for the `rope_parameters` of transformers 5."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        return  # absent, or one per kind of layer, in models that transformers 4 does not know
    config.setdefault("rope_theta", rope["rope_theta"])
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    config.setdefault("rope_scaling", None if scaling.get("rope_type") in (None, "default") else scaling)
