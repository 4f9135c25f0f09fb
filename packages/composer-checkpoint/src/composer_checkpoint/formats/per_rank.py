"""Per-rank files: one file for each rank, with its shards as they are in memory.

They are also read and written tensor by tensor, by one process.
"""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
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
from composer_checkpoint.commit import put_in_place, record_set, refuse_existing, write_beside
from composer_checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, NoCheckpointError, first_few
from composer_checkpoint.files import load_file, save_file, verify_file
from composer_checkpoint.formats.pt import open_pt_source, stream_pt, tensors_to_write
from composer_checkpoint.formats.tensor_source import StoredTensor, TensorSource, refuse_sparse
from composer_checkpoint.lock import complete_interrupted_sets
from composer_checkpoint.manifest import LAYOUT_KEY, SAVE_ID_KEY, Manifest, layout_in, refuse_mixed_saves
from composer_checkpoint.names import sibling_name

ELASTIC_VARIABLE = "COMPOSER_LOCAL_ELASTIC"

_RANK = "{rank}"
LAYOUT_NAME = "the layout of per-rank files"  # in messages


def save_local(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    process_group: ProcessGroup | None = None,
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
    write_together(own, lambda place: manifests.append(save_file(content, place, info=info)), ranks, overwrite)
    return manifests[0]


def local_content(
    state_dict: Mapping[str, Any], info: Mapping[str, Any] | None, ranks: Ranks
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of this rank's file and of its manifest. Every rank must call this."""

    def propose() -> str:
        refuse_doubled(state_dict, (DTensor,), "/", LAYOUT_NAME)  # the layout lists only DTensors
        return uuid.uuid4().hex

    # All ranks take rank 0's id, by which loading recognizes files of different saves.
    save_id = ranks.exchange(propose, lambda proposed: proposed[:1] * len(proposed))
    layout = {**_layout(state_dict, ranks), SAVE_ID_KEY: save_id}
    local = _map_leaves(
        dict(state_dict), lambda _, leaf: _own_part(leaf).detach() if isinstance(leaf, torch.Tensor) else leaf
    )
    return {**local, LAYOUT_KEY: layout}, {**(info or {}), SAVE_ID_KEY: save_id}


def own_path(path: str | os.PathLike[str], ranks: Ranks) -> Path:
    """Return the path of this rank's file."""
    return _path_of(path, ranks.rank, ranks.world_size)


def write_together(own: Path, write: Callable[[Path], object], ranks: Ranks, overwrite: bool) -> None:
    """Write a file on each rank, and name either all of them or none. Every rank must call this.

    `write` writes to the temporary path that it gets.
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
    process_group: ProcessGroup | None = None,
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
    # All ranks have read and checked their files before any of them changes its state.
    loaded = ranks.together(lambda: _read(state_dict, path, ranks, verify))
    ranks.exchange(
        lambda: loaded.get(LAYOUT_KEY, {}).get(SAVE_ID_KEY), lambda ids: [refuse_mixed_saves(ids, path)] * len(ids)
    )
    values = _leaves(loaded)

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
    with open_local_source(path) as source:
        if verify:
            for rank in range(len(source.files)):
                verify_file(_path_of(path, rank, len(source.files)))
        return _map_leaves(source.tree, lambda _, leaf: leaf.read() if isinstance(leaf, StoredTensor) else leaf)


def _read(state_dict: Mapping[str, Any], path: str | os.PathLike[str], ranks: Ranks, verify: bool) -> dict[str, Any]:
    """Return this rank's values, after comparing their names and shapes with the state dict."""
    own = _path_of(path, ranks.rank, ranks.world_size)
    # A rank beyond the number of saving ranks has no file; rank 0's file has that number.
    file = own if own.exists() else _path_of(path, 0, ranks.world_size)
    if not file.exists():
        raise NoCheckpointError(f"{file} does not exist. Local files are complete with one file of each rank.")
    content = load_file(file, verify=verify)
    saved = layout_in(content, file)["world_size"]
    if saved != ranks.world_size:
        if os.environ.get(ELASTIC_VARIABLE) != "1":
            raise ValueError(
                f"{os.fspath(path)} holds the files of {saved} ranks, and {ranks.world_size} load them: local files "
                f"are loaded by as many ranks as saved them. Start {saved} ranks, set {ELASTIC_VARIABLE}=1 to put the "
                f"shards together, or convert the files with merge_local()."
            )
        content = _parts_of(merge_local(path, verify=verify), state_dict)
    _compare(state_dict, _leaves(content), own)
    return content


def _parts_of(merged: dict[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of whole tensors."""
    wanted = _leaves(state_dict)

    def cut(name: str, leaf: Any) -> Any:
        target = wanted.get(name)
        if not isinstance(target, DTensor) or not isinstance(leaf, torch.Tensor) or leaf.shape != target.shape:
            return leaf
        own = zip(_offsets(target), target.to_local().shape, strict=True)
        return leaf[tuple(slice(start, start + length) for start, length in own)]

    return _map_leaves(merged, cut, noted_names())


def _compare(state_dict: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    wanted = _leaves(state_dict)
    missing = [name for name in wanted if name not in values]
    differing = [
        f"{name} (shape {tuple(_own_part(leaf).shape)} here and {_shape(values[name])} there)"
        for name, leaf in wanted.items()
        if isinstance(leaf, torch.Tensor) and name in values and _shape(values[name]) != tuple(_own_part(leaf).shape)
    ]
    if missing or differing:
        raise IncompatibleCheckpointError(
            f"{path} does not fit what is loaded: {len(missing)} missing: {first_few(missing)}; "
            f"{len(differing)} different: {first_few(differing)}. Load it into the model and optimizer "
            f"that it was saved from, spread in the same way."
        )


def _layout(state_dict: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    spread = {name: leaf for name, leaf in _leaves(state_dict, Names()).items() if isinstance(leaf, DTensor)}
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


def _leaves(root: Any, names: Names | None = None) -> dict[str, Any]:
    """Return the leaves by name, those of a shared container under each of its names.

    The default names are unique, unlike those of the layout.
    """
    leaves: dict[str, Any] = {}

    def note(name: str, leaf: Any) -> Any:
        leaves[name] = leaf
        return leaf

    _map_leaves(root, note, names or noted_names())
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
    content, _ = _collect(model, optimizers)
    return save_local(content, path, info=info, timeout_s=timeout_s)


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
    content, named = _collect(model, optimizers)
    load_local(content, path, verify=verify)
    set_model_state_dict(model, content["state"]["model"])
    for name, optimizer in named.items():
        set_optimizer_state_dict(model, optimizer, content["state"]["optimizers"][name])


def _collect(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> tuple[dict[str, Any], dict[str, Optimizer]]:
    """Return the content of a file, and the optimizers by name."""
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    named = {type(optimizer).__qualname__: optimizer for optimizer in listed}
    if len(named) < len(listed):
        raise ValueError(
            f"optimizers={[type(optimizer).__qualname__ for optimizer in listed]}: they are identified by their "
            f"class, and two have the same. Save each to a file of its own."
        )
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if named:
        state["optimizers"] = {name: get_optimizer_state_dict(model, each) for name, each in named.items()}
    return {"state": state}, named


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
    check_local(tree, path)
    finals = [Path(template.replace(_RANK, str(rank))) for rank in range(world_size)]
    for final in finals:
        refuse_existing(final, overwrite)
    temporaries = [sibling_name(final) for final in finals]
    save_id = uuid.uuid4().hex
    notes = {**(info or {}), SAVE_ID_KEY: save_id}
    with ExitStack() as undo:
        for rank, (temporary, final) in enumerate(zip(temporaries, finals, strict=True)):
            undo.callback(discard, temporary)
            write = partial(stream_pt, _part(tree, rank, world_size, save_id), info=notes, progress=progress)
            write_beside(temporary, final, write, overwrite=overwrite)
        # Renamed only now, so that a failed write leaves the earlier set as it was. From the record on, what completes
        # a set after a kill needs the temporary files.
        record = record_set(list(zip(finals, temporaries, strict=True)))[0]
        if record is not None:
            undo.pop_all()
        for temporary, final in zip(temporaries, finals, strict=True):
            put_in_place(temporary, final, overwrite=overwrite)
        if record is not None:
            discard(record)


def check_local(tree: Mapping[str, Any], path: str | os.PathLike[str], called: str = "a set of per-rank files") -> None:
    """Raise if per-rank files have no form for a tree, before anything is written."""
    refuse_sparse(tensors_to_write(tree, path, called), called)
    refuse_doubled(tree, (StoredTensor, torch.Tensor), "/", LAYOUT_NAME)


def _part(tree: Mapping[str, Any], rank: int, world_size: int, save_id: str) -> dict[str, Any]:
    """Return the content of a rank's file."""
    tensors: dict[str, Any] = {}

    def change(name: str, value: Any) -> Any:
        # Scalars and RNG states are replicated, as under FSDP2.
        if not isinstance(value, StoredTensor) or not value.shape or name.startswith("rng"):
            return value
        # Rounded up, as `Shard(0)` splits a dimension: the last ranks may have fewer rows or none.
        rows = -(-value.shape[0] // world_size)
        start = min(rank * rows, value.shape[0])
        tensors[name] = {
            "placements": ["S(0)"],
            "global_shape": list(value.shape),
            "offsets": [start, *(0 for _ in value.shape[1:])],
        }
        return value.rows(start, min(rows, value.shape[0] - start))

    part: dict[str, Any] = map_tree(dict(tree), change)
    if isinstance(part.get("rng"), list):
        part["rng"] = part["rng"][rank : rank + 1]
    layout = {"world_size": world_size, "rank": rank, "mesh_shape": [world_size], "mesh_names": []}
    return {**part, LAYOUT_KEY: {**layout, "tensors": tensors, SAVE_ID_KEY: save_id}}


def open_local_source(path: str | os.PathLike[str]) -> TensorSource:
    """Open the files that `save_local` wrote. Plain data is rank 0's, except for `rng`, which has the states of all."""
    template = os.fspath(path)
    with ExitStack() as opened:
        first = open_pt_source(template.replace(_RANK, "0"))
        sources = [opened.enter_context(first)]
        world_size = layout_in(first.tree, template)["world_size"]
        paths = [template.replace(_RANK, str(rank)) for rank in range(world_size)]
        if missing := [file for file in paths if not os.path.exists(file)]:
            raise NoCheckpointError(
                f"{len(missing)} of the files of {world_size} ranks are missing: {first_few(missing)}. Bring them "
                f"together in one folder."
            )
        sources += [opened.enter_context(open_pt_source(file)) for file in paths[1:]]
        layouts = [layout_in(source.tree, template) for source in sources]
        refuse_mixed_saves([layout.get(SAVE_ID_KEY) for layout in layouts], template)
        for rank, layout in enumerate(layouts):
            if (layout["world_size"], layout["rank"]) != (world_size, rank):
                raise CorruptCheckpointError(
                    f"{paths[rank]} is of rank {layout['rank']} of {layout['world_size']}, and it should be of rank "
                    f"{rank} of {world_size}. Bring together the files of one save."
                )
        files = {Path(file).name: source.size_bytes for file, source in zip(paths, sources, strict=True)}
        merged = TensorSource("local", _merged(sources, layouts), sum(files.values()), first.manifest, files=files)
        return merged.on_close(opened.pop_all())


def layout_of(tree: Any) -> Mapping[str, Any] | None:
    """Return how the tensors of a per-rank file are sharded; `None` for other files."""
    layout = tree.get(LAYOUT_KEY) if isinstance(tree, dict) else None
    return layout if isinstance(layout, dict) else None


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
            box = tuple(slice(start, start + length) for start, length in zip(offsets, part.shape, strict=True))
            whole[box].copy_(part.read())
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
