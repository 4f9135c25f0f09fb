"""Writing the folder of a sharded checkpoint with never more than one tensor in memory."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from composer_checkpoint._tree import map_tree
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.sharded.planner import WholeSavePlanner
from composer_checkpoint.sharded.writer import VerifiedWriter
from composer_checkpoint.tensors._unfit import refuse_unfit
from composer_checkpoint.tensors.source import StoredTensor, as_stored

__all__ = ["stream_sharded"]


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

    The folder is what as many ranks would have saved together: each tensor is cut along its first dim into pieces of
    `torch.chunk`, as FSDP2 cuts it. It exists once all of it is on the disk.

    Args:
        tree: Dicts and lists of `StoredTensor`s, tensors and plain data.
        folder: A local path.
        num_files: Over how many files the tensors are spread.
        info: What the manifest shall say about the run.
        overwrite: Whether a checkpoint of this name may be replaced.
        progress: Called with the number of bytes after each piece.

    Returns:
        The manifest.

    Raises:
        ValueError: If `num_files` is less than 1.
        CheckpointConflictError: If the folder exists and may not be replaced.
        IncompatibleCheckpointError: If a tensor is sparse, or if two entries have one name once the keys on the way to
            them are joined by dots.

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
        raise ValueError(f"num_files={num_files!r} is no number of files. Give 1 or more.")
    refuse_unfit(tree, "dcp", folder)
    planner = _StreamingPlanner(progress)
    writer = VerifiedWriter(folder, info=info, overwrite=overwrite)
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


class _StreamingPlanner(WholeSavePlanner):
    """Plans with descriptions of tensors, and reads each when it is written."""

    def __init__(self, progress: Callable[[int], object] | None) -> None:
        super().__init__()
        self.tensors: dict[int, StoredTensor] = {}
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the tensor, or the piece of it, that an item is about."""
        described = self.stored(write_item)
        if described is None:
            return self.transform_object(write_item, map_tree(self.lookup_object(write_item.index), self._read))
        chunk = write_item.tensor_data.chunk if write_item.tensor_data is not None else None
        if chunk is None or tuple(chunk.sizes) == described.shape:
            piece = described.read()
        else:
            row = described.numel // described.shape[0]
            piece = described.read_range(chunk.offsets[0] * row, chunk.sizes[0] * row).view(tuple(chunk.sizes))
        if self._progress is not None:
            self._progress(piece.nbytes)
        return piece

    def stored(self, item: WriteItem) -> StoredTensor | None:
        """Return what stands behind an item, `None` for one that is no tensor."""
        value = self.state_dict.get(item.index.fqn)
        return self.tensors.get(id(value)) if isinstance(value, torch.Tensor) else None

    def _read(self, _: str, value: Any) -> Any:
        """Read a tensor that lies in an item of another kind, such as a tuple, which is saved as one."""
        described = self.tensors.get(id(value)) if isinstance(value, torch.Tensor) else None
        return value if described is None else described.read()


def _described(tree: Any, tensors: dict[int, StoredTensor]) -> dict[str, Any]:
    """Return the tree with tensors on the meta device, and note what each of them stands for."""

    def change(_: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = as_stored(value)
        if not isinstance(value, StoredTensor):
            return value
        described = torch.empty(value.shape, dtype=value.dtype, device="meta")
        tensors[id(described)] = value
        return described

    return map_tree(tree, change)


def _spread(plan: SavePlan, num_files: int, planner: _StreamingPlanner) -> list[SavePlan]:
    items: list[list[WriteItem]] = [[] for _ in range(num_files)]
    for item in plan.items:
        tensor = planner.stored(item)
        if tensor is None or not tensor.shape or num_files == 1 or not tensor.numel:
            items[0].append(item)
            continue
        rows = -(-tensor.shape[0] // num_files)
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
