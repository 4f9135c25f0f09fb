"""Per-rank files: one file for each rank, with its shards as they are in memory."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_checkpoint._durability import discard
from composer_checkpoint._ranks import Ranks
from composer_checkpoint._tree import Names, map_tree, noted_names, refuse_doubled
from composer_checkpoint.commit import put_in_place, record_set, write_beside
from composer_checkpoint.errors import IncompatibleCheckpointError, NoCheckpointError
from composer_checkpoint.files import load_file, save_file, verify_file
from composer_checkpoint.lock import complete_interrupted_sets
from composer_checkpoint.manifest import LAYOUT_KEY, SAVE_ID_KEY, Manifest, layout_in, refuse_mixed_saves
from composer_checkpoint.names import sibling_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "ELASTIC_VARIABLE",
    "LAYOUT_KEY",
    "SAVE_ID_KEY",
    "load_local",
    "local_content",
    "merge_local",
    "own_path",
    "refuse_mixed_saves",
    "save_local",
    "write_together",
    "load_local_state",
    "save_local_state",
]

ELASTIC_VARIABLE = "COMPOSER_LOCAL_ELASTIC"

_RANK = "{rank}"
_MAX_LISTED = 10


def save_local(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    process_group: "ProcessGroup | None" = None,
    overwrite: bool = True,
    timeout_s: float | None = None,
) -> Manifest:
    """Save this rank's shards to a separate file. Every rank of the group must call this.

    No file gets its final name before the files of all ranks are on the disk, and once one has its name, all of them
    get theirs. If the ranks are killed in between, `remove_leftovers` completes the set, and each run that saves to the
    folder calls it. This needs a folder that rank 0 shares with the other ranks. On node-local disks, files that
    replace others may end up mixed, and loading refuses those; save under a new name each time there, with `{batch}`.

    The file has this rank's part of each DTensor as a plain tensor. To reassemble the parts, `local_layout` has the
    world size, the rank, the mesh, and each tensor's placements, global shape and offsets.

    Args:
        state_dict: Tensors, DTensors and plain data in nested dicts and lists.
        path: Path of the file, with `{rank}` in it if there are several ranks.
        info: Entries of the manifest about the run.
        process_group: The ranks that hold the state dict. All of them when `None`.
        overwrite: Whether to replace an existing file of this name.
        timeout_s: Time limit in seconds for the write of each rank. The save fails if a rank does not respond within
            three times as long. `None` sets no limit for the disk.

    Returns:
        The manifest of this rank's file.

    Raises:
        ValueError: If there are several ranks and no `{rank}` in the path.
        IncompatibleCheckpointError: On all ranks, before anything is written, if on any of them a DTensor has the name
            of another item once the keys of its path are joined by slashes.
        CheckpointError: On all ranks, if any of them fails to write its file, or takes too long. Earlier files are
            left unchanged.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/ba2_rank{rank}.pt"
        >>> manifest = save_local({"state": {"model": {"w": torch.ones(2)}}}, path)
        >>> sorted(load_file(path.format(rank=0)))
        ['local_layout', 'state']
    """
    ranks = Ranks(process_group, timeout_s=timeout_s)
    own = own_path(path, ranks)
    content, info = local_content(state_dict, info, ranks)
    manifests: list[Manifest] = []
    write_together(
        own, lambda unfinished: manifests.append(save_file(content, unfinished, info=info)), ranks, overwrite
    )
    return manifests[0]


def local_content(
    state_dict: Mapping[str, Any], info: Mapping[str, Any] | None, ranks: Ranks
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of this rank's file and of its manifest. Every rank must call this."""

    def propose() -> str:
        refuse_doubled(state_dict, (DTensor,), "/", "the layout of per-rank files")  # the layout lists only DTensors
        return uuid.uuid4().hex

    # All ranks take rank 0's id, by which loading recognizes files of different saves.
    save_id = ranks.exchange(propose, lambda proposed: proposed[:1] * len(proposed))
    layout = {**_layout(state_dict, ranks), SAVE_ID_KEY: save_id}
    return {**_to_local(state_dict), LAYOUT_KEY: layout}, {**(info or {}), SAVE_ID_KEY: save_id}


def own_path(path: str | os.PathLike[str], ranks: Ranks) -> Path:
    """Return the path of this rank's file."""
    return _path_of(path, ranks.rank, ranks.world_size)


def write_together(own: Path, write: Callable[[Path], object], ranks: Ranks, overwrite: bool) -> None:
    """Write a file on each rank, and name either all of them or none. Every rank must call this.

    Args:
        own: Path of this rank's file.
        write: Function that writes to the temporary path passed to it.
        ranks: The ranks that take part.
        overwrite: Whether to replace an existing file of this name.
    """
    own = Path(os.path.abspath(own))  # saving may run user code that changes the current folder
    temporary = sibling_name(own)
    with ExitStack() as undo:
        undo.callback(discard, temporary)
        # First, all files reach the disk. A rank that hangs does so here, before any file has its final name.
        ranks.together(lambda: write_beside(temporary, own, write, overwrite=overwrite))
        if ranks.world_size > 1:
            # From here on no rank deletes its file, even if another one fails: if the record exists by then, the next
            # process that cleans up completes the set, and otherwise it removes the files as leftovers.
            undo.pop_all()
        record = ranks.exchange(lambda: (own, temporary), record_set)
        ranks.together(lambda: put_in_place(temporary, own, overwrite=overwrite))
    if record is not None and ranks.rank == 0:
        discard(record)


def load_local(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    process_group: "ProcessGroup | None" = None,
) -> None:
    """Load this rank's file into a state dict, in place. Every rank of the group must call this.

    If a run was killed while it replaced the files by those of a later save, that replacement is completed first.

    With `COMPOSER_LOCAL_ELASTIC=1` in the environment, files of another number of ranks are reassembled, and each rank
    takes its part of the whole.

    Args:
        state_dict: Tensors and DTensors of the right shapes, and plain data to be replaced, in nested dicts and lists.
            It may lack parts of the files.
        path: Path with `{rank}`, as passed to `save_local`.
        verify: Whether to compare the files with their hashes.
        process_group: The ranks that hold the state dict. All of them when `None`.

    Raises:
        ValueError: If the files are of another number of ranks; or if there are several ranks and no `{rank}` in the
            path.
        NoCheckpointError: If the files do not exist.
        CheckpointError: On all ranks, if the file of any is damaged, unsafe or of another model. Nothing was changed.
    """
    ranks = Ranks(process_group)
    folder = _path_of(path, ranks.rank, ranks.world_size).parent
    ranks.together(lambda: complete_interrupted_sets(folder) if ranks.rank == 0 else None)
    loaded: list[Mapping[str, Any]] = []
    # All ranks have read and checked their files before any of them changes its state.
    ranks.together(lambda: loaded.append(_read(state_dict, path, ranks, verify)))
    ranks.exchange(
        lambda: loaded[0].get(LAYOUT_KEY, {}).get(SAVE_ID_KEY),
        lambda ids: [refuse_mixed_saves(ids, path)] * len(ids),
    )
    values = _own_names(loaded[0])

    def take(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return values[name]
        with torch.no_grad():
            _own_part(leaf).copy_(values[name])
        return leaf

    state_dict.update(_map_leaves(state_dict, take, noted_names()))


def merge_local(path: str | os.PathLike[str], *, verify: bool = True) -> dict[str, Any]:
    """Return the state dict, with whole tensors, that per-rank files hold together. One process suffices.

    Plain data is rank 0's, except for the `rng` list, which has the states of all ranks.

    Args:
        path: Path with `{rank}`, as passed to `save_local`.
        verify: Whether to compare the files with their hashes.

    Raises:
        NoCheckpointError: If a file is missing.
        CheckpointError: If a file is damaged or unsafe, or the files are not of one save.
    """
    # Here, since few loads need them.
    from composer_checkpoint.formats.per_rank_tensors import open_local_source
    from composer_checkpoint.formats.tensor_source import StoredTensor

    with open_local_source(path) as source:
        if verify:
            for rank in range(len(source.files)):
                verify_file(_path_of(path, rank, len(source.files)))
        return _map_leaves(source.tree, lambda _, leaf: leaf.read() if isinstance(leaf, StoredTensor) else leaf)


def _read(state_dict: Mapping[str, Any], path: str | os.PathLike[str], ranks: Ranks, verify: bool) -> dict[str, Any]:
    """Return this rank's values, after comparing their names and shapes with the state dict."""
    own = _path_of(path, ranks.rank, ranks.world_size)
    # A rank beyond the number of saving ranks has no file; rank 0's file has that number.
    content = _load(path, ranks.rank if own.exists() else 0, verify)
    saved = content[LAYOUT_KEY]["world_size"]
    if saved != ranks.world_size:
        if os.environ.get(ELASTIC_VARIABLE) != "1":
            raise ValueError(
                f"{os.fspath(path)} holds the files of {saved} ranks, and {ranks.world_size} load them: local files "
                f"are loaded by as many ranks as saved them. Start {saved} ranks, set {ELASTIC_VARIABLE}=1 to put the "
                f"shards together, or convert the files with merge_local()."
            )
        content = _parts_of(merge_local(path, verify=verify), state_dict)
    _compare(state_dict, _own_names(content), own)
    return content


def _parts_of(merged: dict[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of whole tensors."""
    wanted = _own_names(state_dict)

    def cut(name: str, leaf: Any) -> Any:
        target = wanted.get(name)
        if not isinstance(target, DTensor) or not isinstance(leaf, torch.Tensor) or leaf.shape != target.shape:
            return leaf
        for dim, (start, length) in enumerate(zip(_offsets(target), target.to_local().shape, strict=True)):
            leaf = leaf.narrow(dim, start, length)
        return leaf

    return _map_leaves(merged, cut, noted_names())


def _compare(state_dict: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    wanted = _own_names(state_dict)
    missing = [name for name in wanted if name not in values]
    differing = [
        f"{name} (shape {tuple(_own_part(leaf).shape)} here and {_shape(values[name])} there)"
        for name, leaf in wanted.items()
        if isinstance(leaf, torch.Tensor) and name in values and _shape(values[name]) != tuple(_own_part(leaf).shape)
    ]
    if missing or differing:
        raise IncompatibleCheckpointError(
            f"{path} does not fit what is loaded: {len(missing)} missing: {', '.join(missing[:_MAX_LISTED])}; "
            f"{len(differing)} different: {', '.join(differing[:_MAX_LISTED])}. Load it into the model and optimizer "
            f"that it was saved from, spread in the same way."
        )


def _load(path: str | os.PathLike[str], rank: int, verify: bool) -> dict[str, Any]:
    file = Path(os.fspath(path).replace(_RANK, str(rank)))
    if not file.exists():
        raise NoCheckpointError(f"{file} does not exist. Local files are complete with one file of each rank.")
    content = load_file(file, verify=verify)
    layout_in(content, file)
    return cast("dict[str, Any]", content)


def _to_local(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return _map_leaves(
        dict(state_dict), lambda _, leaf: _own_part(leaf).detach() if isinstance(leaf, torch.Tensor) else leaf
    )


def _layout(state_dict: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    spread: dict[str, DTensor] = {}

    def note(name: str, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            spread[name] = leaf
        return leaf

    _map_leaves(state_dict, note)  # visits a shared container under each of its names, as loading does
    mesh = next(iter(spread.values())).device_mesh if spread else None
    return {
        "world_size": ranks.world_size,
        "rank": ranks.rank,
        "mesh_shape": [] if mesh is None else list(mesh.shape),
        "mesh_names": [] if mesh is None else list(mesh.mesh_dim_names or ()),
        "tensors": {
            name: {
                "placements": [str(placement) for placement in tensor.placements],
                "global_shape": list(tensor.shape),
                "offsets": _offsets(tensor),
            }
            for name, tensor in spread.items()
        },
    }


def _offsets(tensor: DTensor) -> list[int]:
    """Return where this rank's shard begins, from the method that torch's own checkpoints use."""
    (chunk,) = tensor.__create_chunk_list__()
    return list(chunk.offsets)


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _map_leaves(root: Any, change: Callable[[str, Any], Any], names: Names | None = None) -> Any:
    def changed(name: str, value: Any) -> Any:
        return value if isinstance(value, dict | list | tuple) else change(name, value)

    return map_tree(root, changed, names=names)


def _own_names(root: Any) -> dict[str, Any]:
    """Return the leaves by names that are unique, unlike those of the layout."""
    leaves: dict[str, Any] = {}

    def note(name: str, leaf: Any) -> Any:
        leaves[name] = leaf
        return leaf

    _map_leaves(root, note, noted_names())
    return leaves


def _path_of(path: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    text = os.fspath(path)
    if world_size > 1 and _RANK not in text:
        raise ValueError(
            f"path={text!r} is one file for {world_size} ranks, and each must have its own. Put {_RANK} into the name."
        )
    return Path(text.replace(_RANK, str(rank)))


def save_local_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    info: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> "Manifest":
    """Save this rank's part of a model and its optimizers to a separate file. Every rank must call this.

    For a model sharded with `fully_shard` the part is its shards; for a plain one, or one in
    `DistributedDataParallel`, it is everything. Names are those of the plain model, and the layout of the file is that
    of the per-rank files that a run saves.

    Args:
        path: Path of the file, with `{rank}` in it if there are several ranks.
        model: The model.
        optimizers: The optimizer, or several of different classes.
        info: Entries of the manifest about the run.
        timeout_s: Time limit in seconds for the write of each rank.

    Returns:
        The manifest of this rank's file.

    Raises:
        ValueError: If there are several ranks and no `{rank}` in the path, or two optimizers of one class.
        CheckpointError: On all ranks, if any of them cannot write its file.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> path = tempfile.mkdtemp() + "/ba2_rank{rank}.pt"
        >>> manifest = save_local_state(path, model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> load_local_state(path, model)
    """
    return save_local(_collect(model, _named(optimizers)), path, info=info, timeout_s=timeout_s)


def load_local_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    verify: bool = True,
) -> None:
    """Load this rank's file into a model and its optimizers, sharded as when saved. Every rank must call this.

    Args:
        path: Path with `{rank}`, as passed to `save_local_state`, or that of a run's per-rank files.
        model: The model.
        optimizers: The optimizer, or several. With none, only the model is loaded.
        verify: Whether to compare the files with their hashes.

    Raises:
        ValueError: If another number of ranks saved the files, unless `COMPOSER_LOCAL_ELASTIC=1` makes them elastic.
        NoCheckpointError: If the files do not exist.
        CheckpointError: On all ranks, if the file of any is damaged, unsafe or of another model. Nothing was changed.
    """
    named = _named(optimizers)
    content = _collect(model, named)
    load_local(content, path, verify=verify)
    set_model_state_dict(model, content["state"]["model"])
    for name, optimizer in named.items():
        set_optimizer_state_dict(model, optimizer, content["state"]["optimizers"][name])


def _collect(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizers:
        state["optimizers"] = {name: get_optimizer_state_dict(model, each) for name, each in optimizers.items()}
    return {"state": state}


def _named(optimizers: Optimizer | Sequence[Optimizer]) -> dict[str, Optimizer]:
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    named = {type(optimizer).__qualname__: optimizer for optimizer in listed}
    if len(named) < len(listed):
        raise ValueError(
            f"optimizers={[type(optimizer).__qualname__ for optimizer in listed]}: they are identified by their "
            f"class, and two have the same. Save each to a file of its own."
        )
    return named
