"""Loading of a sharded checkpoint into a state dict that may be sharded differently."""

import io
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._traverse import traverse_state_dict, traverse_state_dict_v_2_3  # as its planners do
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItemType

from composer_checkpoint._ranks import Ranks
from composer_checkpoint._tree import doubled, path_text
from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.sharded._metadata import MAX_NAME_CHARS, MAX_STEPS
from composer_checkpoint.sharded.reader import VerifyingReader, decode_object, encode_object


def load_sharded(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    verify: bool = True,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    planner: LoadPlanner | None = None,
) -> None:
    """Load a folder into a state dict, in place. Every rank of the group must call this.

    Each rank reads what its shards need, regardless of the number of ranks that saved and of the sharding. No rank
    changes anything before all ranks have found everything they need to be whole and of the right shape.

    Args:
        state_dict: Tensors and DTensors of the right shapes, and plain data to be replaced, in nested dicts and lists.
            It may lack parts of the checkpoint, such as the optimizer's.
        folder: A local path, or a URI that fsspec supports, of a folder that `save_sharded`, torch or Composer wrote.
        verify: Whether to compare the hashes of the parts that are read. Sizes are always compared.
        strict: Whether entries, shapes and dtypes must equal those of the checkpoint. If not, matching ones are loaded.
        process_group: The ranks that hold the state dict. All of them when `None`.
        storage_options: Options for fsspec.
        planner: Planner that maps reads to tensors, in place of the one for `strict`. Its reads are compared with the
            hashes, but their entries and shapes are not checked.

    Raises:
        NoCheckpointError: If the checkpoint does not exist.
        UnsafeCheckpointError: If it has more than data.
        CorruptCheckpointError: If it differs from what was written, with the shard and the tensor.
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
    """Load as `load_sharded` does, with a custom reader and planner. Every rank must call this."""
    plan = _plan(state_dict, reader, planner, ranks)
    ranks.together(lambda: reader.read_data(planner.finish_plan(plan), planner).wait())


def check_sharded(state_dict: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Verify the hashes of the parts that each rank would load, without loading them. Every rank must call this."""
    ranks = Ranks()
    _plan(state_dict, VerifyingReader(folder), ComparingLoadPlanner(strict=True), ranks)


def _plan(state_dict: dict[str, Any], reader: VerifyingReader, planner: LoadPlanner, ranks: Ranks) -> LoadPlan:
    """Return this rank's reads, once every rank has found its part whole and of the right shape."""

    def plan_locally() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(state_dict, metadata, ranks.rank == 0)
        reader.set_up_storage_reader(metadata, ranks.rank == 0)
        return reader.prepare_local_plan(planner.create_local_plan())

    if not isinstance(planner, ComparingLoadPlanner):  # that one plans without the other ranks
        return ranks.exchange(plan_locally, lambda plans: reader.prepare_global_plan(planner.create_global_plan(plans)))
    # All ranks raise if any of them fails, so that none begins to read.
    return ranks.together(plan_locally)


log = getLogger(__name__)

_MAX_LISTED = 10


class WholeSavePlanner(DefaultSavePlanner):
    """Planner that also saves empty dicts. DCP drops them, so that they would be missing when the state is loaded.

    If `first_rank_decides`, a tensor that is replicated on several ranks is taken from the first of them. Otherwise
    replicas are assumed equal, and the rank with the least to write writes each.
    """

    def __init__(self, *, first_rank_decides: bool = False) -> None:
        super().__init__()
        self._first_rank_decides = first_rank_decides

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the state dict."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for path in _empty_dicts(state_dict, ()):
            name = ".".join(map(str, path))
            if name not in self.state_dict:
                self.state_dict[name], self.mappings[name] = {}, path

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the writes of each rank. Rank 0 calls this."""
        # Each rank has checked its own names. torch would merge different entries of the same name on several ranks.
        known: dict[str, tuple[int, tuple[str | int, ...]]] = {}
        for rank, plan in enumerate(all_plans):
            for name, path in (plan.planner_data or {}).items():
                first, other = known.setdefault(name, (rank, path))
                if other != path:
                    places = (f"{path_text(other)} on rank {first}", f"{path_text(path)} on rank {rank}")
                    raise doubled(*places, name, "a sharded checkpoint")
        # Before torch removes duplicates, since it would keep those of the rank with the least to write.
        return super().create_global_plan(_first_copies(all_plans) if self._first_rank_decides else all_plans)


class ComparingLoadPlanner(DefaultLoadPlanner):
    """Planner that refuses the checkpoint of another model before anything is read, and lists the differences.

    Entries of parts of the checkpoint that the state dict lacks entirely, such as the optimizer's when only weights are
    loaded, are ignored. Entries other than tensors are read as plain data.

    Args:
        strict: Whether missing, unexpected and differing entries are refused. If not, matching entries are loaded,
            dtypes are converted, and the number of the other entries is logged.
        may_lack: Last parts of the names of non-tensor entries that the checkpoint may lack.
    """

    def __init__(self, strict: bool = True, may_lack: Collection[str] = ()) -> None:
        # This class compares both sides itself, so that its error lists all differences at once.
        super().__init__(allow_partial_load=True)
        self._strict, self._may_lack = strict, frozenset(may_lack)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the state dict.

        Raises:
            IncompatibleCheckpointError: If it has two entries of one name, or a sparse tensor.
        """
        refuse_unfit_entries(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        refuse_unfit_tensors(self.state_dict, self.mappings, "loads into")

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's reads.

        Raises:
            IncompatibleCheckpointError: If the state dict and the checkpoint do not fit.
        """
        assert self.metadata is not None  # set_up_planner comes first
        saved = self.metadata.state_dict_metadata
        old: dict[Path, Any] = {}
        traverse_state_dict_v_2_3(self.original_state_dict, old.__setitem__)
        old_names = {".".join(map(str, path)): path for path in old}
        # Names that only the old flattening produces mean that torch 2.3 or earlier wrote the checkpoint.
        if (set(saved) - set(self.state_dict)) & set(old_names):
            self.state_dict, self.mappings = {name: old[path] for name, path in old_names.items()}, old_names
        asked = self.state_dict
        missing = [name for name in asked if name not in saved and not self._need_not_be_there(name)]
        differing = {
            name: how
            for name, value in asked.items()
            if name in saved and (how := _difference(value, saved[name], self._strict)) is not None
        }
        self._judge(missing, _unexpected(asked, self.mappings, self.metadata), differing, len(asked))
        fitting = {name: asked[name] for name in asked if name in saved and name not in differing}
        return create_default_local_load_plan(fitting, self.metadata)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry other than a tensor into the state dict."""
        checked = decode_object(value.getvalue())
        super().load_bytes(read_item, encode_object(checked))  # it unpickles, so it gets our own pickle of checked data

    def _need_not_be_there(self, name: str) -> bool:
        return self.mappings[name][-1] in self._may_lack and not isinstance(self.state_dict[name], torch.Tensor)

    def _judge(self, missing: list[str], unexpected: list[str], differing: Mapping[str, str], num_asked: int) -> None:
        if not (missing or unexpected or differing):
            return
        lists = "; ".join(
            text
            for text in (
                _listed("missing from the checkpoint", missing),
                _listed("in the checkpoint but not asked for", unexpected),
                _listed("different", [f"{name} ({how})" for name, how in differing.items()]),
            )
            if text
        )
        num_matched = num_asked - len(missing) - len(differing)
        if self._strict:
            raise IncompatibleCheckpointError(
                f"the checkpoint does not fit what is loaded: {lists}. Load it into the model and optimizer that it "
                f"was saved from, load weights only if the optimizer's entries differ, or pass strict=False to load "
                f"what fits."
            )
        if num_asked and not num_matched:
            raise IncompatibleCheckpointError(
                f"nothing of the checkpoint fits what is loaded: {lists}. Load the checkpoint of this model."
            )
        log.warning("Loaded %d of %d entries that were asked for: %s.", num_matched, num_asked, lists)


def _empty_dicts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of empty dicts below the outermost one, in the form of DCP's paths."""
    if isinstance(value, Mapping):
        if not value and path:
            yield path
        for key, child in value.items():
            yield from _empty_dicts(child, (*path, str(key)))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _empty_dicts(child, (*path, index))


def _first_copies(plans: list[SavePlan]) -> list[SavePlan]:
    """Remove the writes of tensors that an earlier rank also holds whole."""
    seen: set[MetadataIndex] = set()
    left: list[SavePlan] = []
    for plan in plans:
        items = [item for item in plan.items if item.type is not WriteItemType.TENSOR or item.index not in seen]
        seen.update(item.index for item in items)
        left.append(replace(plan, items=items))
    return left


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:_MAX_LISTED])}{more}"


def _difference(value: object, entry: object, strict: bool) -> str | None:
    if isinstance(value, torch.Tensor) != isinstance(entry, TensorStorageMetadata):
        return "a tensor here, no tensor there" if isinstance(value, torch.Tensor) else "no tensor here, a tensor there"
    if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
        return None
    if value.shape != entry.size:
        return f"shape {tuple(value.shape)} here and {tuple(entry.size)} there"
    if strict and value.dtype != entry.properties.dtype:
        return f"{value.dtype} here and {entry.properties.dtype} there"
    return None


def _unexpected(asked: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], metadata: Metadata) -> list[str]:
    """Return the saved tensors that are missing from dicts of which other entries are loaded."""
    # Siblings only, since whole parts may be left out on purpose.
    parents = {paths[name][:-1] for name in asked}
    saved_paths = metadata.planner_data or {}
    return [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if name not in asked
        and isinstance(entry, TensorStorageMetadata)
        and saved_paths.get(name, (name,))[:-1] in parents
    ]


Path = tuple[str | int, ...]


def refuse_unfit_entries(state_dict: Mapping[Any, Any], tensor_kinds: tuple[type, ...] = (torch.Tensor,)) -> None:
    """Raise if two entries have the same name, which is their path joined by dots, or a name is too long to be read.

    `tensor_kinds` are the types that stand for tensors. A list without any of them is one entry.
    """
    known: dict[str, Path] = {}

    def visit(path: Path, _: Any) -> None:
        name = ".".join(map(str, path))
        if name in known:
            raise doubled(path_text(known[name]), path_text(path), name, "a sharded checkpoint")
        if len(name) > MAX_NAME_CHARS or len(path) > MAX_STEPS:
            raise IncompatibleCheckpointError(
                f"{path_text(path):.200} has a name of {len(name)} characters and {len(path)} keys, and of a sharded "
                f"checkpoint no more than {MAX_NAME_CHARS} and {MAX_STEPS} are read. Give it shorter keys, or save one "
                f".pt file with save_file() or state_dict_type='full'."
            )
        known[name] = path

    traverse_state_dict(dict(state_dict), visit, lambda value: isinstance(value, tensor_kinds))
    for path in _empty_dicts(state_dict, ()):  # entries, since WholeSavePlanner saves them
        visit(path, None)


def refuse_unfit_tensors(
    entries: Mapping[str, Any], paths: Mapping[str, Path], verb: str, *, may_be_meta: bool = True
) -> None:
    """Raise if there is a tensor for which torch's format has no description, or which has no elements.

    `paths` has the keys of the path to each entry, where known; `verb` is for the message, such as `'saves'`.
    """
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor):
            continue
        path = "/".join(map(str, paths.get(name, (name,))))
        if value.is_quantized:
            raise IncompatibleCheckpointError(
                f"{path} is quantized, as {value.dtype}, and a sharded checkpoint {verb} plain ones only. Keep its "
                f"int_repr() and its scale, or save one .pt file, with save_file() or state_dict_type='full'."
            )
        if value.layout != torch.strided:
            raise IncompatibleCheckpointError(
                f"{path} is a tensor of layout {value.layout}, and a sharded checkpoint {verb} dense ones only. Make "
                f"it dense, as to_dense() does, or keep sparse ones in one .pt file, with save_file() or "
                f"state_dict_type='full'."
            )
        refuse_bits(path, value.dtype)
        if value.is_meta and not may_be_meta:
            raise TypeError(
                f"{path} is on the meta device, where it has no elements to save. Give the model memory and weights "
                f"first, as to_empty() and load_state_dict() do."
            )


def refuse_bits(name: str, dtype: torch.dtype) -> None:
    """Raise if a dtype is one of bits, such as `torch.bits8`, whose size torch's format does not know."""
    if str(dtype).startswith("torch.bits"):
        raise IncompatibleCheckpointError(
            f"{name} is {dtype}, and a sharded checkpoint does not support bits dtypes. Save its view(torch.uint8), "
            f"write one .pt file, or leave it out."
        )
