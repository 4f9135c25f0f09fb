"""Loading a sharded checkpoint into a state dict that may be spread otherwise."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.sharded.planner import ComparingLoadPlanner
from composer_checkpoint.sharded.reader import VerifyingReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_sharded", "load_sharded", "load_with_reader"]


def load_sharded(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    verify: bool = True,
    strict: bool = True,
    process_group: "ProcessGroup | None" = None,
    storage_options: Mapping[str, Any] | None = None,
    planner: LoadPlanner | None = None,
) -> None:
    """Load a folder into a state dict, in place. Every rank of the group must call this.

    Each rank reads what its shards need, however many ranks saved it and however they were spread. Nothing is changed
    on any rank unless all of them have found everything that they need to be whole and fitting.

    Args:
        state_dict: Tensors and DTensors of the right shapes, and plain data that will be replaced, in nested dicts and
            lists. It may leave out parts of the checkpoint, such as the optimizer's.
        folder: Written by `save_sharded`, by torch, or by Composer: a local path, or a URI that fsspec knows.
        verify: Whether the hashes of what is read are compared. Sizes always are.
        strict: Whether the entries, shapes and dtypes must be those of the checkpoint. If not, what fits is loaded.
        process_group: The ranks that hold the state dict. All of them when `None`.
        storage_options: For fsspec.
        planner: Who says what is read into what, in place of one that is as `strict` as was asked for. What it asks
            for is compared with the hashes; whether that fits is its own affair.

    Raises:
        NoCheckpointError: If there is no such checkpoint.
        UnsafeCheckpointError: If it asks for anything that a checkpoint does not need.
        CorruptCheckpointError: If it is not what was written; the message names the shard and the tensor.
        IncompatibleCheckpointError: If it is of another model.

    Example:
        >>> import tempfile, torch
        >>> from composer_checkpoint.sharded import save_sharded
        >>> folder = tempfile.mkdtemp() + "/ep1"
        >>> manifest = save_sharded({"model": {"w": torch.ones(2)}, "epoch": 1}, folder)
        >>> state_dict = {"model": {"w": torch.zeros(2)}, "epoch": 0}
        >>> load_sharded(state_dict, folder)
        >>> state_dict
        {'model': {'w': tensor([1., 1.])}, 'epoch': 1}
    """
    ranks = Ranks(process_group)
    reader = VerifyingReader(folder, verify=verify, storage_options=storage_options)
    load_with_reader(state_dict, reader, planner or ComparingLoadPlanner(strict), ranks)


def load_with_reader(state_dict: dict[str, Any], reader: VerifyingReader, planner: LoadPlanner, ranks: Ranks) -> None:
    """Load as `load_sharded` does, with a reader and a planner of one's own. Every rank must call this."""
    plan = _plan(state_dict, reader, planner, ranks)
    ranks.together(lambda: reader.read_data(planner.finish_plan(plan), planner).wait())


def check_sharded(state_dict: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Compare what each rank would load with its hashes, and load nothing. Every rank must call this.

    Args:
        state_dict: As for `load_sharded`; its tensors' contents do not matter.
        folder: As for `load_sharded`. What is needed of a remote one is fetched.

    Raises:
        CheckpointError: On all ranks, as `load_sharded` does.
    """
    ranks = Ranks()
    _plan(state_dict, VerifyingReader(folder), ComparingLoadPlanner(strict=True), ranks)


def _plan(state_dict: dict[str, Any], reader: VerifyingReader, planner: LoadPlanner, ranks: Ranks) -> LoadPlan:
    """Return what this rank will read, once every rank has found its part whole and fitting."""

    def plan_locally() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(state_dict, metadata, ranks.rank == 0)
        reader.set_up_storage_reader(metadata, ranks.rank == 0)
        return reader.prepare_local_plan(planner.create_local_plan())

    if not isinstance(planner, ComparingLoadPlanner):  # which needs to know nothing of the other ranks
        return ranks.exchange(plan_locally, lambda plans: reader.prepare_global_plan(planner.create_global_plan(plans)))
    plans: list[LoadPlan] = []
    ranks.together(lambda: plans.append(plan_locally()))
    return plans[0]
