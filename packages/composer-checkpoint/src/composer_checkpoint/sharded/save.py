"""Saving a state dict that is spread over ranks."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from composer_checkpoint._ranks import Ranks
from composer_checkpoint.files import Specs
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.sharded._entries import refuse_sparse_entries, refuse_unfit_entries, refuse_without_elements
from composer_checkpoint.sharded._storage import Source, only_one_process
from composer_checkpoint.sharded.load import ComparingLoadPlanner, WholeSavePlanner, load_with_reader
from composer_checkpoint.sharded.reader import VerifyingReader
from composer_checkpoint.sharded.writer import VerifiedWriter
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, retry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "DistCPObjectStoreReader",
    "FileSystemReaderWithValidation",
    "dist_cp_load",
    "PlannedSave",
    "plan_save",
    "save_sharded",
    "write_planned",
]


def save_sharded(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    process_group: "ProcessGroup | None" = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    planner: SavePlanner | None = None,
) -> Manifest | None:
    """Save what each rank holds of a state dict into one folder. Every rank of the group must call this.

    The folder exists once all of it is on the disk, and not before. Torch's own reader can load it, too. What several
    ranks hold alike is written by one of them.

    Args:
        state_dict: Tensors, DTensors and plain data in nested dicts and lists, as `get_state_dict` returns them.
        folder: A local path, or a URI that fsspec knows, such as `s3://bucket/run/ep1`.
        info: What the manifest shall say about the run. Values that JSON knows.
        process_group: The ranks that hold the state dict. All of them when `None`.
        overwrite: Whether a checkpoint of this name may be replaced.
        storage_options: For fsspec.
        timeout_s: How long the write of any rank may take; who does not come is given up after three times that.
            `None` waits for a disk as long as it takes.
        planner: Who says what is written, and by which rank. `torch.distributed.checkpoint`'s own when `None`.

    Returns:
        The manifest on rank 0 of the group, `None` on the others.

    Raises:
        CheckpointConflictError: If the folder exists and may not be replaced.
        IncompatibleCheckpointError: On all ranks, before anything is written, if a tensor of any is sparse, or if two
            entries have one name once the keys on the way to them are joined by dots.
        TypeError: Likewise, if a tensor is on the meta device, where it has no elements.
        StorageError: If a disk or store fails on any rank, or takes too long. What was there before is untouched.

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
    """What this rank will write, and, on rank 0, what all of them will."""

    plan: SavePlan
    planner: SavePlanner
    metadata: Metadata | None


def plan_save(
    state_dict: Mapping[str, Any], writer: VerifiedWriter, ranks: Ranks, planner: SavePlanner | None = None
) -> PlannedSave:
    """Agree on who writes what. Every rank must call this; nothing is copied or written."""
    planner = planner or WholeSavePlanner()
    is_first = ranks.rank == 0
    metadata: list[Metadata] = []

    def plan_locally() -> SavePlan:
        _set_up(planner, state_dict, writer, is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_globally(plans: list[SavePlan]) -> list[SavePlan]:
        plans, described = planner.create_global_plan(plans)
        metadata.append(described)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(ranks.exchange(plan_locally, plan_globally))
    return PlannedSave(plan, planner, metadata[0] if is_first else None)


def _set_up(planner: SavePlanner, state_dict: Mapping[str, Any], writer: VerifiedWriter, is_first: bool) -> None:
    """Give a planner the state dict, after refusing what torch would fail at without saying where it is."""
    is_torchs = isinstance(planner, DefaultSavePlanner)  # others may know what to do with it
    if is_torchs and planner.flatten_state_dict:
        refuse_unfit_entries(state_dict)
    planner.set_up_planner(dict(state_dict), writer.storage_meta(), is_first)
    if is_torchs:
        refuse_sparse_entries(planner.state_dict, planner.mappings)
        refuse_without_elements(planner.state_dict, planner.mappings)


def write_planned(
    planned: PlannedSave,
    data: SavePlanner,
    writer: VerifiedWriter,
    ranks: Ranks,
    before_commit: Callable[[], None] | None = None,
) -> Manifest | None:
    """Write what was planned, and commit. Every rank must call this.

    Args:
        planned: From `plan_save`.
        data: Whose `resolve_data` returns the tensors and bytes: the planner's own, or a snapshot of them.
        writer: The one that the plan was made with.
        ranks: Who takes part.
        before_commit: Called when this rank has written; if it raises, there is no checkpoint.
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
        if ranks.rank == 0:
            writer.abort(error)
        raise
    return writer.manifest


# Optimizers have had it in their groups since torch 2.8, and nothing follows from one that was not saved.
_NEWER_KEY = "decoupled_weight_decay"

Validation = Callable[[str, Specs | None], Any]


def dist_cp_load(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
    process_group: "ProcessGroup | None" = None,
) -> None:
    """Load into a state dict, in place, as `torch.distributed.checkpoint.load` does. Every rank must call this.

    Settings of an optimizer that a checkpoint of before torch 2.8 cannot have stay as they are.

    Args:
        state_dict: Tensors, DTensors and plain data.
        storage_reader: Such as `VerifyingReader`.
        planner: One that refuses the checkpoint of another model when `None`.
        process_group: The ranks that hold the state dict. All of them when `None`.

    Raises:
        CheckpointError: If the checkpoint is damaged, unsafe or of another model.
        Exception: Whatever the reader or the planner raises, as it is: torch's own function wraps it into an error
            that `except Exception` does not catch.

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
        # Not through torch, which makes one error of all that a reader may find wrong.
        load_with_reader(state_dict, storage_reader, planner, Ranks(process_group))
        return
    try:
        with warnings.catch_warnings():
            # One process alone is nothing to warn of.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            load(state_dict, storage_reader=storage_reader, planner=planner, process_group=process_group)
    except CheckpointException as error:
        first = next(iter(error.failures.values()), None)
        raise (first[0] if first else RuntimeError(str(error))) from error


class FileSystemReaderWithValidation(VerifyingReader):
    """Reads a folder as `VerifyingReader` does, after a function has looked at each of its files.

    Args:
        path: The folder.
        validation_function: Gets a file's path, and where the stretches begin that will be read of it and how long
            they are; what it returns is true if the file may be read. The function that the variable
            `CHECKPOINT_VALIDATION_FUNCTION` names when `None`, if there is one.
        verify: As in `VerifyingReader`.
    """

    def __init__(
        self, path: str | os.PathLike[str], validation_function: Validation | None = None, *, verify: bool = True
    ) -> None:
        super().__init__(path, verify=verify, validation_function=validation_function)


class DistCPObjectStoreReader(FileSystemReaderWithValidation):
    """Reads a folder of a store. Each node fetches the files that its ranks need, each file once.

    Args:
        source_path: What the names of the folder's objects begin with.
        destination_path: A local folder for the files, the same for all ranks of a node. What it holds already is not
            fetched again, if it has the object's size.
        object_store: The store.
        device_mesh: Not needed: whichever ranks load, each of them gets what it asks for.
        validation_function: As in `FileSystemReaderWithValidation`.
        verify: As in `VerifyingReader`.
    """

    def __init__(
        self,
        source_path: str,
        destination_path: str | os.PathLike[str],
        object_store: ObjectStore,
        device_mesh: "DeviceMesh | None" = None,
        validation_function: Validation | None = None,
        *,
        verify: bool = True,
    ) -> None:
        self.source_path, self.destination_path = source_path.rstrip("/"), os.fspath(destination_path)
        self.object_store = object_store
        super().__init__(self.destination_path, validation_function, verify=verify)

    def open_source(self) -> Source:
        """Return the store's folder."""
        return _StoreSource(self.object_store, self.source_path, Path(self.destination_path))


class _StoreSource:
    """A folder of a store, whose files are fetched when they are asked for, by one process at a time."""

    def __init__(self, store: ObjectStore, name: str, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.folder = store.get_uri(name)
        self._store, self._name, self._place = store, name, place

    def size_bytes(self, name: str) -> int | None:
        """Return how long an object is, `None` if there is none."""
        try:
            return _again(self._store.get_object_size)(f"{self._name}/{name}")
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path:
        """Return the path of the fetched object."""
        path = self._place / name
        with only_one_process(path):
            if not path.exists() or path.stat().st_size != self.size_bytes(name):
                _again(self._store.download_object)(f"{self._name}/{name}", path, overwrite=True)
        return path


_again = retry(ObjectStoreTransientError, num_attempts=5)
