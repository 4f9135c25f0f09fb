"""Weight files of a Hugging Face folder, written with at most one file's weights in memory."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from composer_checkpoint import save_file
from composer_hf.published_weights import PublishedPiece

__all__ = ["Format", "main_dtype", "parse_size", "total_bytes", "write_weight_files"]

Format = Literal["safetensors", "bin", "both"]

FORMATS: Final = ("safetensors", "bin", "both")
_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def write_weight_files(
    folder: Path,
    pieces: Sequence[PublishedPiece],
    read: Callable[[str], Tensor],
    *,
    max_shard_bytes: int,
    format: Format = "safetensors",
    dtype: torch.dtype | None = None,
    is_adapter: bool = False,
) -> list[str]:
    """Write weights to a folder as `from_pretrained` reads them.

    Args:
        folder: An existing folder.
        pieces: The weights to write.
        read: Returns a weight of the checkpoint by name.
        max_shard_bytes: Maximum size of the weights in one file. A larger weight gets its own file.
        format: `'safetensors'`, `'bin'` for files of `torch.save`, or `'both'`.
        dtype: Dtype to convert floating point weights to.
        is_adapter: Whether to name the files as those of an adapter, which is never split.

    Returns:
        The names of the files, including any index.

    Raises:
        ValueError: If `format` is invalid.
        StorageError: If the disk fails.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r} must be one of {', '.join(map(repr, FORMATS))}.")
    groups = [list(pieces)] if is_adapter else list(_groups(pieces, max_shard_bytes, dtype))
    kinds = [kind for kind in ("safetensors", "bin") if format in (kind, "both")]
    names = {kind: _file_names(kind, len(groups), is_adapter=is_adapter) for kind in kinds}
    weight_maps: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    for number, group in enumerate(groups):
        # Both formats are written from the same tensors, so each weight is read once.
        weights = _weights_of(group, read, dtype)
        for kind in kinds:
            name = names[kind][number]
            if kind == "safetensors":
                save_file(weights, folder / name)
            else:
                torch.save(weights, folder / name)
            weight_maps[kind].update(dict.fromkeys(weights, name))
    written = [name for kind in kinds for name in names[kind]]
    if len(groups) > 1:
        for kind in kinds:
            written.append(_write_index(folder, kind, weight_maps[kind], total_bytes(pieces, dtype)))
    return written


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


def main_dtype(pieces: Sequence[PublishedPiece], dtype: torch.dtype | None = None) -> torch.dtype | None:
    """Return the floating point dtype that takes most bytes of a folder's weights."""
    sizes: dict[torch.dtype, int] = {}
    for weight in _targets(pieces, dtype).values():
        if weight.is_floating_point():
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.nbytes
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else None


def total_bytes(pieces: Sequence[PublishedPiece], dtype: torch.dtype | None = None) -> int:
    """Return the total size of the weights in bytes."""
    return sum(weight.nbytes for weight in _targets(pieces, dtype).values())


def cast(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a weight in another floating point dtype; integers are unchanged."""
    return weight.to(dtype) if dtype is not None and weight.is_floating_point() else weight


def _targets(pieces: Sequence[PublishedPiece], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {name: cast(weight, dtype) for piece in pieces for name, weight in piece.targets.items()}


def _groups(
    pieces: Sequence[PublishedPiece], max_shard_bytes: int, dtype: torch.dtype | None
) -> Iterator[list[PublishedPiece]]:
    """Yield the pieces of each file. The weights of one piece stay in one file."""
    group: list[PublishedPiece] = []
    size_bytes = 0
    for piece in pieces:
        own_bytes = total_bytes([piece], dtype)
        if group and size_bytes + own_bytes > max_shard_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(piece)
        size_bytes += own_bytes
    yield group


def _weights_of(
    group: Sequence[PublishedPiece], read: Callable[[str], Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for piece in group:
        for name, weight in piece.convert({source: read(source) for source in piece.sources}).items():
            converted = cast(weight, dtype).contiguous()
            identity = (converted.data_ptr(), converted.shape, converted.dtype)
            # Weights that share memory but are not tied in the configuration are separate in the folder.
            weights[name] = converted.clone() if identity in seen or _is_part(converted) else converted
            seen.add(identity)
    return weights


def _is_part(weight: Tensor) -> bool:
    """Return whether a weight is a view of a larger storage, which `torch.save` would write as a whole."""
    return weight.untyped_storage().nbytes() != weight.nbytes


def _file_names(kind: str, count: int, *, is_adapter: bool) -> list[str]:
    stem = "adapter_model" if is_adapter else "model" if kind == "safetensors" else "pytorch_model"
    if count == 1:
        return [f"{stem}.{kind}"]
    return [f"{stem}-{number:05d}-of-{count:05d}.{kind}" for number in range(1, count + 1)]


def _write_index(folder: Path, kind: str, weight_map: Mapping[str, str], size_bytes: int) -> str:
    name = f"{'model' if kind == 'safetensors' else 'pytorch_model'}.{kind}.index.json"
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / name).write_text(json.dumps(index, indent=2) + "\n")
    return name
