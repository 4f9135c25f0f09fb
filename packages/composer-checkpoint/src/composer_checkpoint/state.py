"""Collect the content of a training state's checkpoint, and save it in the layout of the state."""

import os
import posixpath
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from logging import getLogger
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer_checkpoint._ranks import Ranks
from composer_checkpoint._tree import encode, map_tree, named_leaves, unflatten
from composer_checkpoint.commit import write_on_rank_zero
from composer_checkpoint.files import save_file
from composer_checkpoint.formats.pt import refuse_unsafe_objects
from composer_checkpoint.ignore_keys import IgnoreKeys, check_ignore_keys, without_keys
from composer_checkpoint.manifest import LAYOUT_KEY, SAVE_ID_KEY, refuse_mixed_saves
from composer_checkpoint.names import OF_SAVE, PartialFilePath, sharded_folder
from composer_dist import dist
from composer_dist.reproducibility import get_rng_state
from composer_dist.strategy import Strategy
from composer_events.arguments import check_flags
from composer_events.data_position import EPOCH_START_KEY, LOADER_KEY, DataPosition, begin_next_epoch, keeps_own_state
from composer_events.formatting import check_placeholders
from composer_events.state import State

log = getLogger(__name__)

_VERSION = version("composer-checkpoint")
DEFAULT_PREFIX_DIR = "ep{epoch}-ba{batch}"
TRAIN_DATA_KEY = "train_data"
"""In a checkpoint's `metadata`: the number of samples in the dataset, and the seed of its order."""
_COUNTERS = ("iteration", "epoch", "batch", "sample", "token", "batch_in_epoch")


class Layout(StrEnum):
    """Layout of a checkpoint: which ranks write which files."""

    MONOLITHIC = "monolithic"
    """Rank 0 writes one file."""
    SHARDED = "sharded"
    """All ranks write into one folder."""
    LOCAL = "local"
    """Each rank writes its own shards to a file of its own."""


def layout_of(state: State) -> Layout:
    """Return the layout that `state_dict_type` in the FSDP settings selects."""
    kind = getattr(state.fsdp_config, "state_dict_type", None)
    # One process without FSDP has no shards, so it writes a plain file, which any number of ranks can load.
    if kind == "local" and (state.fsdp_enabled or dist.get_world_size() > 1):
        return Layout.LOCAL
    return Layout.SHARDED if state.fsdp_sharded_state_dict_enabled else Layout.MONOLITHIC


def path_of(state: State, filename: str, folder: str | None = None) -> str:
    """Return the path of a checkpoint at the current time: a file, or the folder of a sharded checkpoint.

    Per-rank files keep `{rank}` in their name.
    """
    match layout_of(state):
        case Layout.SHARDED:
            _warn_of_name(filename, prefix_dir_of(state))
            filename = sharded_folder(filename, prefix_dir_of(state))
        case Layout.LOCAL:
            if "{rank}" not in filename:
                raise ValueError(
                    f"save_filename={filename!r} is one name for {dist.get_world_size()} ranks, and with "
                    f"state_dict_type='local' each writes a file of its own. Put {{rank}} into it, as in "
                    f"'ba{{batch}}_rank{{rank}}.pt'."
                )
            # Doubled, so that formatting leaves `{rank}` in the path, which all ranks then share.
            filename = filename.replace("{rank}", "{{rank}}")
        case Layout.MONOLITHIC:
            pass
    return PartialFilePath(filename, folder).format(state)


@cache  # warns once, although each save calls it
def _warn_of_name(filename: str, prefix_dir: str) -> None:
    name = posixpath.basename(filename)
    is_own = name.removesuffix(".pt") != DEFAULT_PREFIX_DIR + "-rank{rank}"
    if is_own and prefix_dir == DEFAULT_PREFIX_DIR and dist.get_global_rank() == 0:
        log.warning(
            "save_filename=%r does not name the sharded checkpoints, which are folders: this run names them %r. Set "
            "the name with sharded_ckpt_prefix_dir in the FSDP settings, or save one file with state_dict_type='full'.",
            filename,
            sharded_folder(filename, prefix_dir),
        )


def get_save_filename(state: State, filename: str = "ep{epoch}-ba{batch}-rank{rank}") -> str:
    """Return the file that this rank would write if the state were saved now.

    Args:
        state: The training state.
        filename: The template of the file name.

    Returns:
        The file of rank 0, this rank's file of per-rank files, or this rank's first shard in the folder of a sharded
        checkpoint.

    Raises:
        ValueError: If per-rank files would all have the same name.

    Example:
        >>> from composer_events import State
        >>> get_save_filename(State(None, rank_zero_seed=1, device="cpu"))
        'ep0-ba0-rank0'
    """
    path = path_of(state, filename)
    if layout_of(state) is Layout.SHARDED:
        return os.path.join(path, f"__{dist.get_global_rank()}_0.distcp")
    return own_file(path)


def prefix_dir_of(state: State) -> str:
    """Return the template of a sharded checkpoint's folder."""
    return getattr(state.fsdp_config, "sharded_ckpt_prefix_dir", None) or DEFAULT_PREFIX_DIR


def collect(state: State, *, weights_only: bool = False, ignore_keys: IgnoreKeys | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint at the current time. Every rank must call this.

    Tensors that are not sharded share memory with the model and the optimizers.
    """
    state.settle()
    strategy = owner_of(state)
    attributes = ["model"] if weights_only else list(state.serialized_attributes)
    if strategy is not None:  # it collects these parts itself, below
        attributes = [name for name in attributes if name not in PARTS]
    # Other attributes are left out before collecting, so that nothing is gathered in vain.
    with as_sharded(state), _set_for_now(state, "serialized_attributes", attributes):
        content: dict[str, Any] = {"state": state.state_dict()}
    # Parts such as averages of algorithms; the strategy has gathered the model and the optimizers as the layout needs.
    prepared = _open if layout_of(state) is Layout.SHARDED else _whole
    content["state"] |= prepared({name: part for name, part in content["state"].items() if name not in PARTS})
    if strategy is not None:
        content["state"].update(collect_parts(state, strategy, weights_only=weights_only))
    if not weights_only:
        content["rng"] = _rng(state)
        _add_loader_state(state, content["state"])
        if "metadata" in content["state"] and (data := describe_train_data(state)):
            content["state"]["metadata"][TRAIN_DATA_KEY] = data
    return content if ignore_keys is None else without_keys(content, ignore_keys, "save_ignore_keys")


def _whole(part: Any) -> Any:
    """Return the state of algorithms and callbacks with full tensors in place of shards. Every rank must call this."""
    if next(named_leaves(part, DTensor), None) is None:
        return part
    return map_tree(part, lambda _, leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)


def _open(part: Any) -> Any:
    """Return the state of algorithms and callbacks with the tuples around shards replaced by lists.

    DCP does not descend into a tuple: the whole tuple would be one item, written by one rank.
    """
    around: set[str] = set()
    for name, _ in named_leaves(part, DTensor):
        while name := name.rpartition("/")[0]:
            around.add(name)
    return map_tree(part, lambda name, value: list(value) if name in around and type(value) is tuple else value)


def describe(state: State, *, weights_only: bool = False) -> dict[str, Any]:
    """Return the information about a checkpoint for its manifest."""
    return {
        "composer_checkpoint_version": _VERSION,
        "run_name": state.run_name,
        "timestamp": {name: int(getattr(state.timestamp, name)) for name in _COUNTERS},
        "world_size": dist.get_world_size(),
        "weights_only": weights_only,
    }


def save_checkpoint(
    state: State,
    filename: str = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys | None = None,
) -> str | None:
    """Save a training state atomically. Every rank must call this.

    Rank 0 writes the file; with `state_dict_type='sharded'` all ranks write into a folder, and with `'local'` each
    writes its own file. An existing checkpoint of the same name is replaced, but no other folder.

    Args:
        state: The training state.
        filename: The path, with placeholders for run, ranks and time. Its suffix selects the format, as in `save_file`.
        weights_only: Whether to save only the model and its metadata.
        ignore_keys: Patterns of entries to leave out, such as `'state/optimizers/*'`, or a function that deletes from
            the checkpoint's dict.

    Returns:
        The path, on the ranks that wrote; `None` on the others.

    Raises:
        CheckpointError: On all ranks, if any of them cannot write; an existing checkpoint is untouched.
        CompressorNotFound: If the program that the name needs is not installed.

    Example:
        >>> import tempfile
        >>> from composer_events import State
        >>> state = State(torch.nn.Linear(2, 1), rank_zero_seed=1, device="cpu")
        >>> path = save_checkpoint(state, tempfile.mkdtemp() + "/ep{epoch}-ba{batch}.pt")
        >>> path.rpartition("/")[2]
        'ep0-ba0.pt'
    """
    if ignore_keys is not None:
        check_ignore_keys("ignore_keys", ignore_keys)
    check_flags(weights_only=weights_only)
    check_placeholders(OF_SAVE, filename=filename)
    path = path_of(state, filename)
    content = collect(state, weights_only=weights_only, ignore_keys=ignore_keys)
    info = describe(state, weights_only=weights_only)
    return write(content, path, layout_of(state), info, planner=save_planner_of(state))


def save_planner_of(state: State) -> SavePlanner | None:
    """Return the planner if the state is saved to a sharded checkpoint: that of the FSDP settings, or the default.

    The default saves all buffers of rank 0: they are not sharded, may differ between ranks, and must be consistent.
    """
    if layout_of(state) is not Layout.SHARDED:
        return None
    from composer_checkpoint.sharded.load import WholeSavePlanner  # here, so that other layouts do not load it

    return getattr(state.fsdp_config, "save_planner", None) or WholeSavePlanner(first_rank_decides=True)


def write(
    content: dict[str, Any],
    path: str,
    layout: Layout,
    info: dict[str, Any],
    timeout_s: float | None = None,
    planner: SavePlanner | None = None,
) -> str | None:
    """Write collected content, and return the path on the ranks that wrote. Every rank must call this."""
    match layout:
        case Layout.SHARDED:
            from composer_checkpoint.sharded import save_sharded

            save_sharded(content, path, info=info, overwrite=True, timeout_s=timeout_s, planner=planner)
            return path
        case Layout.LOCAL:
            from composer_checkpoint.formats.per_rank import save_local

            save_local(content, path, info=info, timeout_s=timeout_s)
            return own_file(path)
        case Layout.MONOLITHIC:
            ranks = Ranks(timeout_s=timeout_s)
            write_on_rank_zero(path, lambda unfinished: save_file(content, unfinished, info=info), ranks)
            return path if ranks.rank == 0 else None


def own_file(path: str) -> str:
    """Return this rank's path of per-rank files."""
    return path.replace("{rank}", str(dist.get_global_rank()))


def _rng(state: State) -> list[dict[str, Any]]:
    """Return each rank's RNG state, with the state in which its current epoch began."""
    entries = get_rng_state()
    position = DataPosition.of(state)
    if position is not None:
        own = position.state_dict(state, lambda value, name: refuse_unsafe_objects(encode(value)[0], name))
        for entry, start in zip(entries, dist.all_gather_object(own), strict=True):
            if start:
                entry[EPOCH_START_KEY] = start
    # A per-rank file has its own rank's entry only; `to_dtensors` puts them together.
    return [entries[dist.get_global_rank()]] if layout_of(state) is Layout.LOCAL else entries


def describe_train_data(state: State) -> dict[str, int]:
    """Return the length of a map-style train dataset, and the seed of a sampler that has its own."""
    loader = state.train_dataloader
    if not isinstance(loader, DataLoader):
        return {}
    found: dict[str, int] = {}
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
        found["num_samples"] = len(dataset)
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            found["shuffle_seed"] = sampler.seed
    return found


def _add_loader_state(state: State, saved: dict[str, Any]) -> None:
    has_state = keeps_own_state(state.train_dataloader)
    if saved.get("dataset_state"):
        train = begin_next_epoch(saved["dataset_state"].get("train"), state)
        saved["dataset_state"] = {**saved["dataset_state"], "train": train}
    # Ranks whose dataloader has no state must take part in the gathers too.
    if "dataset_state" in saved and any(dist.all_gather_object(has_state)):
        own = state.train_dataloader.state_dict() if has_state else None
        states = dist.all_gather_object(own)
        saved["dataset_state"] = {**saved["dataset_state"], LOADER_KEY: states}


@contextmanager
def _set_for_now(target: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def as_sharded(state: State) -> AbstractContextManager[None]:
    """Treat a state of type `'local'` as `'sharded'`, which also provides each rank's shards."""
    is_local = layout_of(state) is Layout.LOCAL
    return _set_for_now(state.fsdp_config, "state_dict_type", "sharded") if is_local else nullcontext()


def as_whole(state: State) -> AbstractContextManager[None]:
    """Treat a state of type `'sharded'` as `'full'`, which loads full tensors and keeps each rank's part."""
    is_sharded = layout_of(state) is Layout.SHARDED
    return _set_for_now(state.fsdp_config, "state_dict_type", "full") if is_sharded else nullcontext()


def read_sharded(path: str | os.PathLike[str], state: State, weights_only: bool, *, verify: bool) -> dict[str, Any]:
    """Return this rank's part of a folder's content. Every rank must call this."""
    from composer_checkpoint.sharded import load_sharded

    content = empty_content(path, state, weights_only)
    load_sharded(content, path, verify=verify, planner=getattr(state.fsdp_config, "load_planner", None))
    saved = content.setdefault("state", {})
    if isinstance(algorithms := saved.get("algorithms"), list):
        # They are lists if they contained shards, see `_open`.
        saved["algorithms"] = [tuple(pair) for pair in algorithms]
    return content


def empty_content(path: str | os.PathLike[str], state: State, weights_only: bool) -> dict[Any, Any]:
    """Return a folder's content with empty tensors, sharded as this rank needs them. Every rank must call this."""
    from composer_checkpoint.sharded import read_folder_metadata

    # Together, so that a rank that cannot read it does not leave the others in a collective.
    metadata = Ranks().together(lambda: read_folder_metadata(path))
    parameters = _spread_parameters(state)
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    paths: Mapping[str, Any] = metadata.planner_data or {}
    for name, described in metadata.state_dict_metadata.items():
        keys = tuple(paths.get(name, (name,)))
        # Algorithms that change the model are applied before its weights load, so their entries are read too.
        if weights_only and keys[:2] not in (("state", "model"), ("state", "algorithms")):
            continue
        leaf: Any = None
        # DCP loads into the tensors that it gets, so that they determine the sharding.
        if isinstance(described, TensorStorageMetadata):
            like, dtype, size = _parameter_of(keys, parameters), described.properties.dtype, described.size
            # Sharded like the parameter, so that each rank reads only its part.
            if like is not None and like.shape == size:
                leaf = torch.empty_like(like, dtype=dtype)
            else:
                leaf = torch.empty(size, dtype=dtype)
        leaves.append((keys, leaf))
    return unflatten(leaves)


def to_dtensors(content: dict[str, Any], state: State, path: str) -> dict[str, Any]:
    """Return the content of a per-rank file with its shards as DTensors."""
    layout = content.pop(LAYOUT_KEY)
    if layout["world_size"] != dist.get_world_size():
        raise other_number_of_ranks(path, layout["world_size"])
    refuse_mixed_saves(dist.all_gather_object(layout.get(SAVE_ID_KEY)), path)
    if "rng" in content:  # a file has its own rank's entry; readers expect one for each rank
        content["rng"] = [entry for own in dist.all_gather_object(content["rng"]) for entry in own]
    parameters, described = _spread_parameters(state), layout["tensors"]

    def spread(name: str, leaf: Any) -> Any:
        parameter = _parameter_of(tuple(name.split("/")), parameters)
        if name not in described or parameter is None or list(parameter.shape) != described[name]["global_shape"]:
            return leaf
        return DTensor.from_local(
            leaf, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    return map_tree(content, spread)


def other_number_of_ranks(path: str, saved_by: int) -> ValueError:
    """Return the error for per-rank files that another number of ranks saved."""
    return ValueError(
        f"{path} is one of the files of {saved_by} ranks, and {dist.get_world_size()} load them: per-rank files are "
        f"not elastic. Start {saved_by} ranks, or put the files together with "
        f"composer_checkpoint.formats.per_rank.merge_local (see COMPOSER_LOCAL_ELASTIC)."
    )


def _spread_parameters(state: State) -> dict[str, DTensor]:
    with as_sharded(state):
        weights = state.get_model_state_dict()
    return {name: value for name, value in weights.items() if isinstance(value, DTensor)}


def _parameter_of(keys: tuple[Any, ...], parameters: Mapping[str, DTensor]) -> DTensor | None:
    """Return the sharded parameter to which a tensor of a checkpoint belongs, or `None`."""
    match keys:
        case ("state", "model", name):
            return parameters.get(str(name))
        case ("state", "optimizers", _, "state", name, *_):
            return parameters.get(str(name))
        case ("state", "algorithms", *_, name):  # such as an average of the parameter
            plain = str(name).removeprefix("module.")
            return parameters.get(str(name), parameters.get(plain))
        case _:
            return None


def unchanged_until_step(state: State) -> list[torch.Tensor]:
    """Return the tensors that stay unchanged until the optimizer's next step; none if there are algorithms."""
    if state.algorithms:  # they may change weights at any event
        return []
    # Without buffers, which a forward pass may change, such as the averages of batch normalization.
    stable: list[torch.Tensor] = list(state.model.parameters()) if hasattr(state.model, "parameters") else []
    for optimizer in state.optimizers:
        for of_parameter in getattr(optimizer, "state", {}).values():
            if isinstance(of_parameter, dict):
                stable += [value for value in of_parameter.values() if isinstance(value, torch.Tensor)]
    return stable


PARTS = ("model", "optimizers")
"""Entries of a state dict that a strategy may collect and load itself."""


def owner_of(state: State) -> Strategy | None:
    """Return the strategy that collects the weights, or `None` if the state can collect them itself."""
    if not state.deepspeed_enabled:
        return None
    strategy = getattr(state, "strategy", None)
    if not isinstance(strategy, Strategy):
        raise RuntimeError(
            "DeepSpeed's engine has the weights, and state.strategy, which could collect them, is missing. Set it to "
            "the DeepSpeed strategy that prepared the model."
        )
    return strategy


def collect_parts(state: State, strategy: Strategy, *, weights_only: bool) -> dict[str, Any]:
    """Return the full weights and optimizer state in the form of a run without DeepSpeed. Every rank must call this.

    The parameters are numbered in the optimizer's own order.
    """
    parts: dict[str, Any] = {"model": strategy.model_state_dict(state.model)}
    if not weights_only:
        # Step counts, which ZeRO shares between parameters, are copied: once loaded, each parameter must have its own.
        parts["optimizers"] = {
            name_of_optimizer(state, optimizer): map_tree(
                strategy.optimizer_state_dict(state.model, optimizer),
                lambda _, value: value.clone() if isinstance(value, torch.Tensor) and value.numel() == 1 else value,
            )
            for optimizer in state.optimizers
        }
    return parts


def load_parts(state: State, strategy: Strategy, saved: Mapping[str, Any], *, strict: bool) -> None:
    """Load weights and optimizer state of `collect_parts` or of a run without DeepSpeed. Every rank must call this."""
    if saved.get("model"):
        strategy.load_model_state_dict(state.model, saved["model"], strict=strict)
    if "optimizers" not in saved:
        return
    for optimizer in state.optimizers:
        name = name_of_optimizer(state, optimizer)
        if name in saved["optimizers"]:
            strategy.load_optimizer_state_dict(state.model, optimizer, saved["optimizers"][name])
        else:
            warnings.warn(
                f"{name} is not in the state_dict. Its state will not be restored.", UserWarning, stacklevel=2
            )


def name_of_optimizer(state: State, optimizer: Any) -> str:
    """Return the class name of the optimizer that the engine wraps."""
    return type(getattr(state.model, "basic_optimizer", optimizer)).__qualname__
