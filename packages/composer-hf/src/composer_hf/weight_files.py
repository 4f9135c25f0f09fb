"""Weight files of a Hugging Face folder, written with at most one weight in memory."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from composer_checkpoint.tensors import StoredTensor, plan_shards, stream_pt, stream_shards
from composer_hf.published_weights import PublishedPiece

Format = Literal["safetensors", "bin", "both"]
Files = dict[str, dict[str, StoredTensor]]

FORMATS: Final = ("safetensors", "bin", "both")
_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def published_tensors(
    pieces: Sequence[PublishedPiece], weights: Mapping[str, StoredTensor], dtype: torch.dtype | None = None
) -> dict[str, StoredTensor]:
    """Return a folder's weights by name, each converted when it is read.

    Args:
        pieces: Result of `plan_weights`. Tied copies are not read: compare them first, with `check_ties`.
        weights: Weights of the checkpoint by name.
        dtype: Dtype to convert floating point weights to.
    """
    last = _LastPiece(weights)
    published: dict[str, StoredTensor] = {}
    for piece in pieces:
        # One object for all weights of the piece, since the cache recognizes a piece by its identity.
        own = replace(piece, sources=piece.sources[:1], copies=())
        for name, like in piece.targets.items():
            stored = StoredTensor(like.dtype, tuple(like.shape), partial(last.take, own, name))
            published[name] = stored.to(dtype) if dtype is not None and like.is_floating_point() else stored
    return published


def check_ties(pieces: Iterable[PublishedPiece], weights: Mapping[str, StoredTensor]) -> None:
    """Compare tied weights, except those that share a tensor in the checkpoint."""
    for piece in pieces:
        kept = piece.sources[0]
        for name in piece.copies:
            if weights[kept].storage is None or weights[name].storage != weights[kept].storage:
                one = replace(piece, sources=(kept, name), copies=(name,))
                one.convert({kept: weights[kept].read(), name: weights[name].read()})


def plan_files(
    tensors: Mapping[str, StoredTensor], max_shard_bytes: int, *, format: str, is_adapter: bool = False
) -> Files:
    """Assign tensors to the files that `from_pretrained` reads; an adapter is never split."""
    if is_adapter:
        return {f"adapter_model.{format}": dict(tensors)}
    shards = plan_shards(tensors, max_shard_bytes, _stem(format))
    return {name.replace(".safetensors", f".{format}"): group for name, group in shards.items()}


def write_files(
    folder: Path,
    files: Files,
    *,
    format: str,
    info: Mapping[str, object] | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write the planned files, and their index if there are several, to an existing folder."""
    if format == "safetensors":
        stream_shards(files, folder, info=info, progress=progress)
        return
    for name, tensors in files.items():
        stream_pt(tensors, folder / name, progress=progress)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": total_bytes(files)}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / f"{_stem(format)}.{format}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def parse_size(size: int | str) -> int:
    """Return a size in bytes.

    Args:
        size: A number, or a string with a unit, such as `'500MB'` or `'1GiB'`.

    Raises:
        ValueError: If it is not a size, or less than one byte.

    Example:
        >>> parse_size("5GB")
        5000000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).strip().upper())
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if num_bytes < 1:
        raise ValueError(
            f"max_shard_size={size!r} must be a number of bytes, or one with a unit, such as '500MB' or '5GB'."
        )
    return num_bytes


def main_dtype(files: Files) -> torch.dtype | None:
    """Return the floating point dtype that takes most bytes of a folder's weights."""
    sizes: Counter[torch.dtype] = Counter()
    for tensors in files.values():
        for tensor in tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] += tensor.size_bytes
    return sizes.most_common(1)[0][0] if sizes else None


def total_bytes(files: Files) -> int:
    """Return the total size of the weights in bytes."""
    return sum(tensor.size_bytes for tensors in files.values() for tensor in tensors.values())


class _LastPiece:
    """Cache of the last converted piece, whose weights are usually written one after the other."""

    def __init__(self, weights: Mapping[str, StoredTensor]) -> None:
        self._weights = weights
        self._piece: PublishedPiece | None = None
        self._converted: dict[str, Tensor] = {}

    def take(self, piece: PublishedPiece, name: str) -> Tensor:
        """Return one of a piece's weights, and drop it from the cache."""
        if self._piece is not piece or name not in self._converted:
            self._converted.clear()  # first, so that two pieces are never in memory
            (source,) = piece.sources
            self._piece, self._converted = piece, piece.convert({source: self._weights[source].read()})
        return self._converted.pop(name).contiguous()


def _stem(format: str) -> str:
    return "model" if format == "safetensors" else "pytorch_model"
