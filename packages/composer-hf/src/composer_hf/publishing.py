"""From a Composer checkpoint to a folder that `from_pretrained` reads, without ever having the model in memory."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from composer_checkpoint import IncompatibleCheckpointError, verify, write_atomically
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.tensors import StoredTensor, TensorSource, open_checkpoint
from composer_hf.adapters import changes_base
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import without_code
from composer_hf.published_weights import plan_weights
from composer_hf.tokenizer_files import as_json, for_any_release
from composer_hf.weight_files import Format, main_dtype, parse_size, total_bytes, write_weight_files

__all__ = [
    "as_dtype",
    "local_checkpoint",
    "on_meta",
    "write_huggingface_pretrained_from_composer_checkpoint",
    "pretrained_folder",
    "readable_config",
    "write_description",
    "write_tokenizer",
]

_DTYPES: Final = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
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
    """Write a folder of Hugging Face's from a checkpoint of a `HuggingFaceModel`, whole or not at all.

    The folder has the configurations, the tokenizer's files and the weights, bit for bit unless a precision is asked
    for. Plain transformers loads it, of release 4 or 5. Of a model with an adapter it has the adapter alone, which
    peft loads. The checkpoint is compared with its hashes, and nothing of it is run; never more is in memory than the
    weights of one file.

    Args:
        checkpoint_path: A file or folder that a Trainer has saved, or an address in a store.
        output_folder: The folder.
        local_checkpoint_save_location: Where a checkpoint from a store is kept, and a link to a local one is put.
        format: Of the weights: `'safetensors'`, `'bin'` for `pytorch_model.bin`, or `'both'`.
        max_shard_size: How large a file may become, such as `'5GB'`.
        precision: `'float32'`, `'float16'` or `'bfloat16'`; by default what the checkpoint has.
        overwrite: Whether a folder that exists is replaced. An empty one is, anyway.
        trust_remote_code: Whether code that came with the checkpoint is imported and written.

    Returns:
        The folder.

    Raises:
        CheckpointConflictError: If the folder exists, which is a `FileExistsError`.
        MissingMetadataError: If the checkpoint is of no Hugging Face model, which is a `RuntimeError`.
        UnfittingWeightsError: If weights are missing or too many.
        CheckpointError: If it is damaged, unsafe, or of a model that transformers does not know, or the disk is full.
    """
    max_shard_bytes, dtype = parse_size(max_shard_size), as_dtype(precision)
    overwrite = overwrite or _is_empty(Path(output_folder))
    with local_checkpoint(checkpoint_path, local_checkpoint_save_location) as path:
        verify(path)
        with open_checkpoint(path) as source:
            metadata = HuggingFaceMetadata.from_checkpoint(source.tree, checkpoint_path)
            weights = _weights_of(source, checkpoint_path)
            pieces = plan_weights(on_meta(weights), metadata, trust_remote_code=trust_remote_code)
            with pretrained_folder(
                output_folder,
                metadata,
                dtype=main_dtype(pieces, dtype),
                overwrite=overwrite,
                trust_remote_code=trust_remote_code,
                need_bytes=total_bytes(pieces, dtype) * (2 if format == "both" else 1),
            ) as folder:
                write_weight_files(
                    folder,
                    pieces,
                    lambda name: weights[name].read(),
                    max_shard_bytes=max_shard_bytes,
                    format=format,
                    dtype=dtype,
                    is_adapter=metadata.peft_config is not None,
                )
    return Path(output_folder)


@contextlib.contextmanager
def local_checkpoint(path: Path | str, save_location: Path | str | None = None) -> Iterator[str]:
    """Give the local path of a checkpoint that may lie in a store. What was fetched goes, unless it has a place.

    Args:
        path: A path or an address.
        save_location: Where it is kept; of what is local already, a link.
    """
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
    """Return weights that are not in memory as tensors that tell dtype and shape."""
    return {name: torch.empty(stored.shape, dtype=stored.dtype, device="meta") for name, stored in weights.items()}


def as_dtype(precision: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a precision's name.

    Raises:
        ValueError: If there is none.
    """
    if precision is None or isinstance(precision, torch.dtype):
        return precision
    name = str(precision).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"precision={precision!r} is none that weights are saved in. Use one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _weights_of(source: TensorSource, path: Any) -> Mapping[str, StoredTensor]:
    if not source.weights:
        raise IncompatibleCheckpointError(f"{path} has no weights under state/model. Name another checkpoint.")
    return source.weights


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


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
