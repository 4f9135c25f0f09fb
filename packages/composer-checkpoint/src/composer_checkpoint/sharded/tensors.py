"""Reading and writing of sharded folders with at most one tensor in memory."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from composer_checkpoint._tree import map_tree, unflatten
from composer_checkpoint.formats.pt import tensors_to_write
from composer_checkpoint.formats.tensor_source import StoredTensor, TensorSource, as_stored, refuse_sparse
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.sharded.load import WholeSavePlanner, refuse_bits, refuse_unfit_entries
from composer_checkpoint.sharded.reader import OpenShards, Part, VerifyingReader, list_parts
from composer_checkpoint.sharded.writer import VerifiedWriter


def stream_sharded(
    tree: Any,
    folder: str | os.PathLike[str],
    *,
    num_files: int = 1,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Manifest:
    """Write a tree to a folder that `load_sharded` and torch's own reader load on any number of ranks.

    The folder equals that of `num_files` ranks that save together: each tensor is split along its first dim into the
    pieces of `torch.chunk`, as FSDP2 splits it. The folder appears once all of it is on the disk.

    Args:
        tree: Dicts and lists of `StoredTensor`s, tensors and plain data.
        folder: A local path.
        num_files: Number of files to distribute the tensors over.
        info: Entries of the manifest about the run.
        overwrite: Whether to replace an existing checkpoint of this name.
        progress: Called with the number of bytes after each piece.

    Returns:
        The manifest.

    Raises:
        ValueError: If `num_files` is less than 1.
        CheckpointConflictError: If the folder exists and `overwrite` is false.
        IncompatibleCheckpointError: If a tensor is sparse, or if two entries have one name once the keys of their paths
            are joined by dots.

    Example:
        >>> import tempfile
        >>> from composer_checkpoint import load_sharded
        >>> from composer_checkpoint.tensors import as_stored
        >>> folder = tempfile.mkdtemp() + "/ep1"
        >>> manifest = stream_sharded({"w": as_stored(torch.arange(4))}, folder, num_files=2)
        >>> state_dict = {"w": torch.zeros(4, dtype=torch.int64)}
        >>> load_sharded(state_dict, folder)
        >>> state_dict["w"]
        tensor([0, 1, 2, 3])
    """
    if num_files < 1:
        raise ValueError(f"num_files={num_files!r} must be 1 or more.")
    check_tree(tree, folder)
    planner = _StreamingPlanner(progress)
    writer = VerifiedWriter(folder, info=info, overwrite=overwrite)
    # torch plans the save from tensors on the meta device, which occupy no memory.
    planner.set_up_planner(_described(tree, planner.tensors), writer.storage_meta(), True)
    plans = _spread(planner.create_local_plan(), num_files, planner)
    plans, metadata = planner.create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    with ExitStack() as undo:
        undo.push(lambda kind, error, _: writer.abort(error) if error is not None else None)
        results = [writer.write_data(plan, planner).wait() for plan in plans]
        writer.finish(metadata, results)
    assert writer.manifest is not None  # finish() made it
    return writer.manifest


def check_tree(tree: Any, folder: str | os.PathLike[str], called: str = "a sharded checkpoint") -> None:
    """Raise if a sharded checkpoint has no form for a tree, before anything is written."""
    tensors = tensors_to_write(tree, folder, called)
    refuse_sparse(tensors, called)
    for name, tensor in tensors.items():
        refuse_bits(name, tensor.dtype)
    refuse_unfit_entries(tree, (StoredTensor, torch.Tensor))


class _StreamingPlanner(WholeSavePlanner):
    def __init__(self, progress: Callable[[int], object] | None) -> None:
        super().__init__()
        self.tensors: dict[int, StoredTensor] = {}
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        described = self.stored(write_item)
        if described is None:
            return self.transform_object(write_item, map_tree(self.lookup_object(write_item.index), self._read))
        chunk = write_item.tensor_data.chunk if write_item.tensor_data is not None else None
        if chunk is None or tuple(chunk.sizes) == described.shape:
            piece = described.read()
        else:
            # `_spread` cuts between rows, so each piece is one range of elements.
            row = described.numel // described.shape[0]
            piece = described.read_range(chunk.offsets[0] * row, chunk.sizes[0] * row).view(tuple(chunk.sizes))
        if self._progress is not None:
            self._progress(piece.nbytes)
        return piece

    def stored(self, item: WriteItem) -> StoredTensor | None:
        """Return the tensor behind a write item; `None` for an item of another type."""
        value = self.state_dict.get(item.index.fqn)
        return self.tensors.get(id(value)) if isinstance(value, torch.Tensor) else None

    def _read(self, _: str, value: Any) -> Any:
        """Read a tensor inside another item, such as a tuple, which is saved as one object."""
        described = self.tensors.get(id(value)) if isinstance(value, torch.Tensor) else None
        return value if described is None else described.read()


def _described(tree: Any, tensors: dict[int, StoredTensor]) -> dict[str, Any]:
    """Return the tree with tensors on the meta device, and record the tensor behind each of them."""

    def change(_: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = as_stored(value)
        if not isinstance(value, StoredTensor):
            return value
        described = torch.empty(value.shape, dtype=value.dtype, device="meta")
        tensors[id(described)] = value  # the tree keeps it alive, so its id stays unique
        return described

    return map_tree(tree, change)


def _spread(plan: SavePlan, num_files: int, planner: _StreamingPlanner) -> list[SavePlan]:
    items: list[list[WriteItem]] = [[] for _ in range(num_files)]
    for item in plan.items:
        tensor = planner.stored(item)
        # Items that cannot be split go to the first file.
        if tensor is None or not tensor.shape or num_files == 1 or not tensor.numel:
            items[0].append(item)
            continue
        rows = -(-tensor.shape[0] // num_files)  # rounded up, as torch.chunk does
        for rank, start in enumerate(range(0, tensor.shape[0], rows)):
            items[rank].append(_piece(item.index.fqn, tensor, start, min(rows, tensor.shape[0] - start)))
    return [SavePlan(of_rank, planner_data=plan.planner_data) for of_rank in items]


def _piece(fqn: str, tensor: StoredTensor, start: int, rows: int) -> WriteItem:
    offsets = torch.Size([start, *(0 for _ in tensor.shape[1:])])
    sizes = torch.Size([rows, *tensor.shape[1:]])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, sizes),
        properties=TensorProperties(dtype=tensor.dtype),
        size=torch.Size(tensor.shape),
    )
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def open_sharded_source(folder: str | os.PathLike[str]) -> TensorSource:
    """Open a folder that DCP wrote. A shard is read only when one of its tensors is."""
    reader = VerifyingReader(folder, verify=False)
    metadata = reader.read_metadata()
    parts = list_parts(metadata)
    sizes = {file: Path(folder, file).stat().st_size for file in sorted({part.file for part in parts.values()})}
    with ExitStack() as opened:
        tree = _tree(metadata, parts, opened.enter_context(OpenShards(reader.source)))
        source = TensorSource("dcp", tree, sum(sizes.values()), reader.manifest, files=sizes)
        return source.on_close(opened.pop_all())


def _tree(metadata: Metadata, parts: dict[MetadataIndex, Part], shards: OpenShards) -> Any:
    leaves: list[tuple[tuple[str | int, ...], Any]] = []
    paths = metadata.planner_data or {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            value: Any = _stored(fqn, entry, parts, shards)
        else:
            item = shards.check(parts[MetadataIndex(fqn)], None)
            value = map_tree(item, lambda _, leaf: as_stored(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        leaves.append((paths.get(fqn, (fqn,)), value))
    return unflatten(leaves)


def _stored(
    fqn: str, entry: TensorStorageMetadata, parts: dict[MetadataIndex, Part], shards: OpenShards
) -> StoredTensor:
    dtype, shape = entry.properties.dtype, tuple(entry.size)

    def fetch() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for chunk in entry.chunks:
            part = parts[MetadataIndex(fqn, chunk.offsets)]
            box = tuple(slice(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
            # Checked only now: opening the source has read nothing but the metadata.
            place = shards.check(part, None)
            shards.read(part, place, (0,) * len(chunk.sizes), whole[box])
        return whole

    return StoredTensor(dtype, shape, fetch)
