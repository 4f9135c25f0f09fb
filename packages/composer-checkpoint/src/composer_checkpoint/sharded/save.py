"""Saving of sharded state dicts, and Composer's functions and readers for `torch.distributed.checkpoint`."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.distributed.device_mesh import DeviceMesh

from composer_checkpoint._ranks import Ranks
from composer_checkpoint.files import Specs
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.sharded._storage import FetchedFolder, Source, StoreSource
from composer_checkpoint.sharded.load import (
    ComparingLoadPlanner,
    WholeSavePlanner,
    load_with_reader,
    refuse_unfit_entries,
    refuse_unfit_tensors,
)
from composer_checkpoint.sharded.reader import VerifyingReader
from composer_checkpoint.sharded.writer import VerifiedWriter
from composer_checkpoint.stores.base import ObjectStore


def save_sharded(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    process_group: ProcessGroup | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    planner: SavePlanner | None = None,
) -> Manifest | None:
    """Save each rank's shards of a state dict into one folder. Every rank of the group must call this.

    The folder appears once all of it is on the disk, and not before. torch's own reader can load it too. Replicated
    entries are written by one of the ranks that hold them.

    Args:
        state_dict: Tensors, DTensors and plain data in nested dicts and lists, as `get_state_dict` returns them.
        folder: A local path, or a URI that fsspec supports, such as `s3://bucket/run/ep1`.
        info: Entries of the manifest about the run, with values that JSON supports.
        process_group: The ranks that hold the state dict. All of them when `None`.
        overwrite: Whether to replace an existing checkpoint of this name.
        storage_options: Options for fsspec.
        timeout_s: Time limit in seconds for the write of each rank. The save fails if a rank does not respond within
            three times as long. `None` sets no limit for the disk.
        planner: Planner that assigns the writes to ranks. That of `torch.distributed.checkpoint` when `None`.

    Returns:
        The manifest on rank 0 of the group, `None` on the others.

    Raises:
        CheckpointConflictError: If the folder exists and `overwrite` is false.
        IncompatibleCheckpointError: On all ranks, before anything is written, if any rank has a sparse tensor, or two
            entries have one name once the keys of their paths are joined by dots.
        TypeError: On all ranks, before anything is written, if a tensor is on the meta device and has no elements.
        StorageError: If the disk or store fails on any rank, or takes too long. An earlier checkpoint is unchanged.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp() + "/ep1"
        >>> manifest = save_sharded({"model": {"w": torch.ones(2)}, "epoch": 1}, folder)
        >>> sorted(manifest.tensors)
        ['epoch', 'model.w']
    """
    ranks = Ranks(process_group, timeout_s=timeout_s)
    writer = VerifiedWriter(folder, info=info, overwrite=overwrite, storage_options=storage_options)
    planned = plan_save(state_dict, writer, ranks, planner)
    return write_planned(planned, planned.planner, writer, ranks)


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """Plan of a save: this rank's writes, and, on rank 0, the metadata of all writes."""

    plan: SavePlan
    planner: SavePlanner
    metadata: Metadata | None


def plan_save(
    state_dict: Mapping[str, Any], writer: VerifiedWriter, ranks: Ranks, planner: SavePlanner | None = None
) -> PlannedSave:
    """Assign the writes to ranks. Every rank must call this; nothing is copied or written."""
    planner = planner or WholeSavePlanner()
    is_first = ranks.rank == 0
    metadata: list[Metadata] = []

    def plan_locally() -> SavePlan:
        # torch would fail later, without the name of the entry. A planner that is not torch's may support more.
        torchs = planner if isinstance(planner, DefaultSavePlanner) else None
        if torchs is not None and torchs.flatten_state_dict:
            refuse_unfit_entries(state_dict)
        planner.set_up_planner(dict(state_dict), writer.storage_meta(), is_first)
        if torchs is not None:
            # Only now, since the planner has flattened the state dict and recorded the paths.
            refuse_unfit_tensors(torchs.state_dict, torchs.mappings, "saves", may_be_meta=False)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_globally(plans: list[SavePlan]) -> list[SavePlan]:
        plans, described = planner.create_global_plan(plans)
        metadata.append(described)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(ranks.exchange(plan_locally, plan_globally))
    return PlannedSave(plan, planner, metadata[0] if is_first else None)


def write_planned(
    planned: PlannedSave,
    data: SavePlanner,
    writer: VerifiedWriter,
    ranks: Ranks,
    before_commit: Callable[[], None] | None = None,
) -> Manifest | None:
    """Write the planned items, and commit. Every rank must call this.

    `data` is a planner whose `resolve_data` returns the tensors and bytes: the one of the plan, or a snapshot.
    `before_commit` is called once this rank has written. If it raises, no checkpoint is committed.
    """

    def write() -> list[WriteResult]:
        results = writer.write_data(planned.plan, data).wait()
        if before_commit is not None:
            before_commit()
        return results

    def finish(results: list[list[WriteResult]]) -> list[None]:
        assert planned.metadata is not None  # rank 0 finishes
        writer.finish(planned.metadata, results)
        return [None] * len(results)

    try:
        ranks.exchange(write, finish)
    except BaseException as error:
        if ranks.rank == 0:  # which created the temporary folder
            writer.abort(error)
        raise
    return writer.manifest


# Optimizers have this entry in their groups since torch 2.8; older checkpoints lack it without harm.
_NEWER_KEY = "decoupled_weight_decay"

Validation = Callable[[str, Specs | None], Any]


def dist_cp_load(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
) -> None:
    """Load into a state dict, in place, as `torch.distributed.checkpoint.load` does. Every rank must call this.

    Settings of an optimizer that checkpoints from before torch 2.8 lack are left unchanged.

    Args:
        state_dict: Tensors, DTensors and plain data.
        storage_reader: A reader such as `VerifyingReader`.
        planner: The planner. One that refuses the checkpoint of another model when `None`.
        process_group: The ranks that hold the state dict. All of them when `None`.

    Raises:
        CheckpointError: If the checkpoint is damaged, unsafe or of another model.
        Exception: Any error of the reader or the planner, unchanged: torch's own function wraps it into an error that
            `except Exception` does not catch.

    Example:
        >>> import tempfile, torch
        >>> from composer_checkpoint.sharded import VerifyingReader, save_sharded
        >>> folder = tempfile.mkdtemp() + "/ep1"
        >>> manifest = save_sharded({"w": torch.ones(2)}, folder)
        >>> state_dict = {"w": torch.zeros(2)}
        >>> dist_cp_load(state_dict, VerifyingReader(folder))
        >>> state_dict["w"]
        tensor([1., 1.])
    """
    planner = planner or ComparingLoadPlanner(may_lack=(_NEWER_KEY,))
    if isinstance(storage_reader, VerifyingReader) and isinstance(planner, ComparingLoadPlanner):
        # Not through torch, which wraps the reader's errors in a `CheckpointException`.
        load_with_reader(state_dict, storage_reader, planner, Ranks(process_group))
        return
    try:
        with warnings.catch_warnings():
            # A load in one process needs no warning.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            load(state_dict, storage_reader=storage_reader, planner=planner, process_group=process_group)
    except CheckpointException as error:
        first = next(iter(error.failures.values()), None)
        raise (first[0] if first else RuntimeError(str(error))) from error


class FileSystemReaderWithValidation(VerifyingReader):
    """Reader like `VerifyingReader` that passes each file to a validation function before reading it.

    Args:
        path: Path of the folder.
        validation_function: Function of a file's path and the offset and length of each range to be read, which returns
            true if the file may be read. When `None`, the one named by the environment variable
            `CHECKPOINT_VALIDATION_FUNCTION`, if any.
        verify: As for `VerifyingReader`.
    """

    def __init__(
        self, path: str | os.PathLike[str], validation_function: Validation | None = None, *, verify: bool = True
    ) -> None:
        super().__init__(path, verify=verify, validation_function=validation_function)


class DistCPObjectStoreReader(FileSystemReaderWithValidation):
    """Reader of a folder in an object store. Each node downloads the files that its ranks need, each file once.

    Args:
        source_path: Prefix of the names of the folder's objects.
        destination_path: A local folder for the files, the same for all ranks of a node. A file that it already has is
            not downloaded again if its size is that of the object.
        object_store: The store.
        device_mesh: Unused, since each rank downloads the files that it needs.
        validation_function: As for `FileSystemReaderWithValidation`.
        verify: As for `VerifyingReader`.
    """

    def __init__(
        self,
        source_path: str,
        destination_path: str | os.PathLike[str],
        object_store: ObjectStore,
        device_mesh: DeviceMesh | None = None,
        validation_function: Validation | None = None,
        *,
        verify: bool = True,
    ) -> None:
        self.source_path, self.destination_path = source_path.rstrip("/"), os.fspath(destination_path)
        self.object_store = object_store
        super().__init__(self.destination_path, validation_function, verify=verify)

    def open_source(self) -> Source:
        """Return the folder of the store."""
        place = Path(self.destination_path)
        place.mkdir(parents=True, exist_ok=True)
        fetched = FetchedFolder(self.object_store, self.source_path, place)
        return StoreSource(self.object_store.get_uri(self.source_path), fetched, is_temporary=False)
