"""From a Composer checkpoint to a folder that `from_pretrained` reads, without ever having the model in memory."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from composer_checkpoint import IncompatibleCheckpointError, verify
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.tensors import StoredTensor, TensorSource, open_checkpoint
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.pretrained_folder import pretrained_folder
from composer_hf.published_weights import plan_weights
from composer_hf.weight_files import Format, main_dtype, parse_size, total_bytes, write_weight_files

__all__ = ["as_dtype", "local_checkpoint", "on_meta", "write_huggingface_pretrained_from_composer_checkpoint"]

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
