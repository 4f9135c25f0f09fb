"""Saving a state dict that is spread over ranks."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from composer_checkpoint.manifest import Manifest
from composer_checkpoint.sharded._entries import (
    refuse_sparse_entries,
    refuse_unfit_entries,
    refuse_without_elements,
)
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.sharded.planner import WholeSavePlanner
from composer_checkpoint.sharded.writer import VerifiedWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PlannedSave", "plan_save", "save_sharded", "write_planned"]


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
