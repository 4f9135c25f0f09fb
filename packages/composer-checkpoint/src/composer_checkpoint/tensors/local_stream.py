"""Writing a set of per-rank files with never more than one tensor in memory."""

import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from composer_checkpoint._leftovers import discard
from composer_checkpoint._tree import map_tree
from composer_checkpoint._unfinished_names import name_beside
from composer_checkpoint.commit import put_in_place, refuse_existing, write_beside
from composer_checkpoint.local_files import LAYOUT_KEY, SAVE_ID_KEY
from composer_checkpoint.tensors._unfit import refuse_unfit
from composer_checkpoint.tensors.pt_stream import stream_pt
from composer_checkpoint.tensors.source import StoredTensor

__all__ = ["stream_local"]

_RANK = "{rank}"


def stream_local(
    tree: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    world_size: int,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a tree to the files that as many ranks, over which FSDP2 has spread its tensors, would have saved.

    Args:
        tree: Dicts and lists of `StoredTensor`s and plain data. `rng`, if it is a list, has an entry for each rank.
        path: With `{rank}` in it. No file has its name before all are on the disk.
        world_size: How many.
        info: What the manifests shall say about the run.
        overwrite: Whether files of these names may be replaced.
        progress: Called with the number of bytes after each piece.

    Raises:
        ValueError: If there is no `{rank}` in the path, or `world_size` is less than 1.
        CheckpointConflictError: If a file exists and may not be replaced.
        IncompatibleCheckpointError: If a tensor is sparse or quantized, or if two things have one name once the keys on
            the way to them are joined by slashes.
        UnsafeCheckpointError: If anything is more than data.

    Example:
        >>> import tempfile, torch
        >>> from composer_checkpoint.tensors import as_stored, open_checkpoint
        >>> path = tempfile.mkdtemp() + "/ba2_rank{rank}.pt"
        >>> stream_local({"state": {"model": {"w": as_stored(torch.arange(3))}}}, path, world_size=2)
        >>> with open_checkpoint(path) as source:
        ...     source.weights["w"].read()
        tensor([0, 1, 2])
    """
    template = os.path.abspath(path)
    if world_size < 1 or _RANK not in template:
        raise ValueError(
            f"path={os.fspath(path)!r}, world_size={world_size!r}: give 1 rank or more, and a path with {_RANK} in it."
        )
    refuse_unfit(tree, "local", path)
    finals = [Path(template.replace(_RANK, str(rank))) for rank in range(world_size)]
    for final in finals:
        refuse_existing(final, overwrite)
    temporaries = [name_beside(final) for final in finals]
    save_id = uuid.uuid4().hex
    notes = {**(info or {}), SAVE_ID_KEY: save_id}
    with ExitStack() as undo:
        for rank, (temporary, final) in enumerate(zip(temporaries, finals, strict=True)):
            undo.callback(discard, temporary)
            part = {**_part(tree, rank, world_size, save_id)}
            write_beside(
                temporary,
                final,
                lambda place, part=part: stream_pt(part, place, info=notes, progress=progress),
                overwrite=overwrite,
            )
        for temporary, final in zip(temporaries, finals, strict=True):
            put_in_place(temporary, final, overwrite=overwrite)


def _part(tree: Mapping[str, Any], rank: int, world_size: int, save_id: str) -> dict[str, Any]:
    """Return what a rank's file holds."""
    tensors: dict[str, Any] = {}

    def change(name: str, value: Any) -> Any:
        if not isinstance(value, StoredTensor) or not value.shape or name.startswith("rng"):
            return value
        part, start = _rows(value, rank, world_size)
        tensors[name] = {
            "placements": ["S(0)"],
            "global_shape": list(value.shape),
            "offsets": [start, *(0 for _ in value.shape[1:])],
        }
        return part

    part: dict[str, Any] = map_tree(dict(tree), change)
    if isinstance(part.get("rng"), list):
        part["rng"] = part["rng"][rank : rank + 1]
    layout = {"world_size": world_size, "rank": rank, "mesh_shape": [world_size], "mesh_names": []}
    return {**part, LAYOUT_KEY: {**layout, "tensors": tensors, SAVE_ID_KEY: save_id}}


def _rows(tensor: StoredTensor, rank: int, world_size: int) -> tuple[StoredTensor, int]:
    """Return the rows of a tensor that are a rank's, and which is the first."""
    rows = -(-tensor.shape[0] // world_size)
    start = min(rank * rows, tensor.shape[0])
    count = min(rows, tensor.shape[0] - start)
    row = tensor.numel // tensor.shape[0] if tensor.shape[0] else 0
    shape = (count, *tensor.shape[1:])
    own = None if tensor.storage is None else (tensor.storage, start, count)
    return (
        StoredTensor(
            tensor.dtype,
            shape,
            lambda: tensor.read_range(start * row, count * row).reshape(shape),
            own,
            lambda first, number: tensor.read_range(start * row + first, number),
        ),
        start,
    )
