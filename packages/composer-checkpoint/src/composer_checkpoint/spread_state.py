"""The content of a checkpoint whose tensors are spread over ranks, as this run's ranks hold them."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from composer_checkpoint._tree import map_tree
from composer_checkpoint.local_files import ELASTIC_VARIABLE, LAYOUT_KEY, SAVE_ID_KEY, refuse_mixed_saves
from composer_checkpoint.sharded import load_sharded, read_folder_metadata
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.sharded.load import check_sharded
from composer_checkpoint.state_io import as_sharded
from composer_dist import dist

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["as_spread", "check_spread", "other_number_of_ranks", "read_sharded"]


def read_sharded(path: str | os.PathLike[str], state: "State", weights_only: bool, *, verify: bool) -> dict[str, Any]:
    """Return a folder's content, of which each rank reads what it holds. Every rank must call this.

    Args:
        path: The folder.
        state: Its model says how tensors are spread; they are whole where it is not.
        weights_only: Read the model and the algorithms only.
        verify: Whether hashes are compared.
    """
    content = _empty_content(path, state, weights_only)
    load_sharded(content, path, verify=verify, planner=getattr(state.fsdp_config, "load_planner", None))
    saved = content.setdefault("state", {})
    if isinstance(algorithms := saved.get("algorithms"), list):
        saved["algorithms"] = [tuple(pair) for pair in algorithms]  # lists where shards were below
    return content


def check_spread(path: str | os.PathLike[str], state: "State") -> None:
    """Compare what each rank would read of a folder with its hashes. Every rank must call this.

    Raises:
        CheckpointError: On all ranks, if anything is not what was written.
    """
    check_sharded(_empty_content(path, state, weights_only=False), path)


def _empty_content(path: str | os.PathLike[str], state: "State", weights_only: bool) -> dict[Any, Any]:
    """Return what a folder holds, with tensors that have no values yet."""
    read: list[Metadata] = []
    Ranks().together(lambda: read.append(read_folder_metadata(path)))
    metadata = read[0]
    parameters = _spread_parameters(state)
    content: dict[Any, Any] = {}
    paths: Mapping[str, Any] = metadata.planner_data or {}
    for name, described in metadata.state_dict_metadata.items():
        keys = tuple(paths.get(name, (name,)))
        if weights_only and keys[:2] not in (("state", "model"), ("state", "algorithms")):
            continue
        leaf: Any = None
        if isinstance(described, TensorStorageMetadata):
            leaf = _empty(described, _parameter_of(keys, parameters))
        _put(content, keys, leaf)
    return _with_lists(content)


def as_spread(content: dict[str, Any], state: "State", path: str) -> dict[str, Any]:
    """Return the content of a per-rank file with its tensors as the shards that they are.

    Raises:
        ValueError: If another number of ranks saved it.
        CorruptCheckpointError: On all ranks, if their files are of different saves.
    """
    layout = content.pop(LAYOUT_KEY)
    if layout["world_size"] != dist.get_world_size():
        raise other_number_of_ranks(path, layout["world_size"])
    refuse_mixed_saves(dist.all_gather_object(layout.get(SAVE_ID_KEY)), path)
    if "rng" in content:  # of this rank, as whoever reads it looks for it: one entry for each
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
    """Return the error of ranks that load the files of another number of ranks."""
    return ValueError(
        f"{path} is one of the files of {saved_by} ranks, and {dist.get_world_size()} load them: per-rank files are "
        f"not elastic. Start {saved_by} ranks, or put the files together with "
        f"composer_checkpoint.local_files.merge_local (see {ELASTIC_VARIABLE})."
    )


def _spread_parameters(state: "State") -> dict[str, DTensor]:
    with as_sharded(state):
        weights = state.get_model_state_dict()
    return {name: value for name, value in weights.items() if isinstance(value, DTensor)}


def _parameter_of(keys: tuple[Any, ...], parameters: Mapping[str, DTensor]) -> DTensor | None:
    """Return the parameter to which a tensor of a checkpoint belongs, if it is spread."""
    match keys:
        case ("state", "model", name):
            return parameters.get(str(name))
        case ("state", "optimizers", _, "state", name, *_):
            return parameters.get(str(name))
        case ("state", "algorithms", *_, name):  # an average of it, say
            plain = str(name).removeprefix("module.")
            return parameters.get(str(name), parameters.get(plain))
        case _:
            return None


def _empty(described: TensorStorageMetadata, like: DTensor | None) -> torch.Tensor:
    dtype = described.properties.dtype
    if like is not None and like.shape == described.size:
        return torch.empty_like(like, dtype=dtype)
    return torch.empty(described.size, dtype=dtype)


def _put(tree: dict[Any, Any], keys: tuple[Any, ...], leaf: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = leaf


def _with_lists(tree: Any) -> Any:
    """Return a tree of dicts with those that count their items as lists."""
    if not isinstance(tree, dict) or not tree:
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    if all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items
