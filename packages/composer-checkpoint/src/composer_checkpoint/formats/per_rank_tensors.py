"""Tensor-by-tensor reader and writer of per-rank files, with at most one tensor in memory."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from composer_checkpoint._durability import discard
from composer_checkpoint._tree import map_tree
from composer_checkpoint.commit import put_in_place, record_set, refuse_existing, write_beside
from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.formats._unsupported import refuse_unfit
from composer_checkpoint.formats.pt_tensors import open_pt_source, stream_pt
from composer_checkpoint.formats.tensor_source import StoredTensor, TensorSource
from composer_checkpoint.manifest import LAYOUT_KEY, SAVE_ID_KEY, layout_in, refuse_mixed_saves
from composer_checkpoint.names import sibling_name

__all__ = ["layout_of", "open_local_source", "stream_local"]


def stream_local(
    tree: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    world_size: int,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a tree as the per-rank files that `world_size` ranks with FSDP2 would have saved.

    Args:
        tree: Dicts and lists of `StoredTensor`s and plain data. `rng`, if it is a list, has an entry for each rank.
        path: Path with `{rank}` in it. No file gets its final name before all are on the disk.
        world_size: Number of ranks.
        info: Entries of the manifests about the run.
        overwrite: Whether to replace existing files of these names.
        progress: Called with the number of bytes after each piece.

    Raises:
        ValueError: If there is no `{rank}` in the path, or `world_size` is less than 1.
        CheckpointConflictError: If a file exists and `overwrite` is false.
        IncompatibleCheckpointError: If a tensor is sparse or quantized, or if two items have one name once the keys of
            their paths are joined by slashes.
        UnsafeCheckpointError: If the tree has anything other than data.

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
    temporaries = [sibling_name(final) for final in finals]
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
        # Renamed only now, so that a failed write leaves the earlier set as it was. From the record on, what completes
        # a set after a kill needs the temporary files.
        record = record_set(list(zip(finals, temporaries, strict=True)))[0]
        if record is not None:
            undo.pop_all()
        for temporary, final in zip(temporaries, finals, strict=True):
            put_in_place(temporary, final, overwrite=overwrite)
        if record is not None:
            discard(record)


def _part(tree: Mapping[str, Any], rank: int, world_size: int, save_id: str) -> dict[str, Any]:
    """Return the content of a rank's file."""
    tensors: dict[str, Any] = {}

    def change(name: str, value: Any) -> Any:
        # Scalars and RNG states are replicated, as under FSDP2.
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
    """Return a rank's rows of a tensor, and the index of the first."""
    # Rounded up, as `Shard(0)` splits a dimension: the last ranks may have fewer rows or none.
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


_RANK = "{rank}"


def open_local_source(path: str | os.PathLike[str]) -> TensorSource:
    """Open the files that `save_local` wrote. Plain data is rank 0's, except for `rng`, which has the states of all.

    Args:
        path: Path with `{rank}` in it.
    """
    template = os.fspath(path)
    with ExitStack() as opened:
        first = opened.enter_context(open_pt_source(_of_rank(template, 0)))
        world_size = layout_in(first.tree, template)["world_size"]
        missing = [file for rank in range(world_size) if not os.path.exists(file := _of_rank(template, rank))]
        if missing:
            raise NoCheckpointError(
                f"{len(missing)} of the files of {world_size} ranks are missing: {', '.join(missing[:8])}. Bring them "
                f"together in one folder."
            )
        others = (opened.enter_context(open_pt_source(_of_rank(template, rank))) for rank in range(1, world_size))
        sources = [first, *others]
        layouts = [layout_in(source.tree, template) for source in sources]
        refuse_mixed_saves([layout.get(SAVE_ID_KEY) for layout in layouts], template)
        for rank, layout in enumerate(layouts):
            if (layout["world_size"], layout["rank"]) != (world_size, rank):
                raise CorruptCheckpointError(
                    f"{_of_rank(template, rank)} is of rank {layout['rank']} of {layout['world_size']}, and it should "
                    f"be of rank {rank} of {world_size}. Bring together the files of one save."
                )
        files = {Path(_of_rank(template, rank)).name: source.size_bytes for rank, source in enumerate(sources)}
        merged = TensorSource("local", _merged(sources, layouts), sum(files.values()), first.manifest, files=files)
        merged.on_close(opened.pop_all())
    return merged


def layout_of(tree: Any) -> Mapping[str, Any] | None:
    """Return how the tensors of a per-rank file are sharded; `None` for other files."""
    layout = tree.get(LAYOUT_KEY) if isinstance(tree, dict) else None
    return layout if isinstance(layout, dict) else None


def _of_rank(template: str, rank: int) -> str:
    return template.replace(_RANK, str(rank))


def _merged(sources: Sequence[TensorSource], layouts: Sequence[Mapping[str, Any]]) -> Any:
    spread = layouts[0]["tensors"]

    def change(name: str, value: Any) -> Any:
        is_spread = isinstance(value, StoredTensor) and name in spread
        return _whole(name, sources, layouts) if is_spread else value

    tree = map_tree(sources[0].tree, change)
    rng = [source.tree.get("rng") for source in sources]
    if all(isinstance(states, list) for states in rng):
        tree["rng"] = [state for states in rng for state in states]
    return {key: value for key, value in tree.items() if key != LAYOUT_KEY}


def _whole(name: str, sources: Sequence[TensorSource], layouts: Sequence[Mapping[str, Any]]) -> StoredTensor:
    parts: dict[tuple[int, ...], StoredTensor] = {}
    shape = tuple(layouts[0]["tensors"][name]["global_shape"])
    for source, layout in zip(sources, layouts, strict=True):
        part = source.tensors.get(name)
        # The files are not trusted to fit together.
        if part is None or part.sparse is not None or name not in layout["tensors"]:
            raise CorruptCheckpointError(f"a rank's file lacks {name!r:.200}. Bring together the files of one save.")
        if part.numel:
            # The first of several replicas suffices; an empty shard may have the offsets of another.
            parts.setdefault(tuple(layout["tensors"][name]["offsets"]), part)
    covered = sum(part.numel for part in parts.values())
    dtype = sources[0].tensors[name].dtype

    def fetch() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for offsets, part in parts.items():
            region = whole
            for dim, (start, length) in enumerate(zip(offsets, part.shape, strict=True)):
                region = region.narrow(dim, start, length)
            region.copy_(part.read())
        return whole

    # Two names are one tensor if all of their parts are.
    same = tuple(part.storage for part in parts.values())
    merged = StoredTensor(dtype, shape, fetch, None if None in same else same)
    if covered != merged.numel:
        raise CorruptCheckpointError(
            f"the files hold {covered} of the {merged.numel} elements of {name!r:.200}. Bring together the files of "
            f"one save."
        )
    return merged
