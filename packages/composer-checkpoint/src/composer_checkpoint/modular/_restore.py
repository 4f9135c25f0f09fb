"""Load weights and optimizer states by the names of parameters, with any sharding."""

import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composer_checkpoint import _spread as spread
from composer_checkpoint._ranks import Ranks
from composer_checkpoint._spread import is_sharded
from composer_checkpoint._tree import unflatten
from composer_checkpoint.errors import IncompatibleCheckpointError, NoCheckpointError, first_few
from composer_checkpoint.files import load_file
from composer_checkpoint.manifest import METADATA_NAME
from composer_checkpoint.modular.options import CheckpointLoadOptions
from composer_checkpoint.modular.state_dict import select_keys
from composer_checkpoint.remote.fetch import get_file_and_shards
from composer_checkpoint.sharded import load_sharded, read_folder_metadata
from composer_checkpoint.stores.base import has_object, is_uri, parse_uri
from composer_checkpoint.stores.fsspec import FsspecObjectStore
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, reach
from composer_dist.reproducibility import seed_context
from composer_dist.wrapping import unwrap_model
from composer_events.state_layout import names_as_saved, with_numbers

_SUFFIXES = ("pt", "safetensors", "safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or the folder of a sharded checkpoint, with the fsspec options to open it."""

    path: str
    is_sharded: bool
    storage_options: Mapping[str, Any] = field(default_factory=dict)


def find_source(path: str | os.PathLike[str], part: str, is_sharded: bool | None) -> Source:
    """Find the checkpoint at a path on rank 0, for all ranks. Every rank must call this."""
    return Ranks().from_first(lambda: _look(os.fspath(path), part, is_sharded))


@contextmanager
def read_on_rank_zero(path: str | os.PathLike[str], prepare: Callable[[Any], Any], *, trusted: bool) -> Iterator[Any]:
    """Yield the result of `prepare` for a file's content on rank 0, `None` on other ranks. Every rank must enter it.

    The tensors are memory-mapped from the file and must not be used after the context. An error in reading or preparing
    is raised on all ranks.
    """
    ranks = Ranks()
    with tempfile.TemporaryDirectory(prefix="composer-checkpoint-") as folder:

        def read() -> Any:
            local = os.fspath(path)
            if is_uri(local):
                local = os.path.join(folder, posixpath.basename(parse_uri(local).path))
                get_file_and_shards(os.fspath(path), local, progress_bar=False)
            return prepare(load_file(local, trusted=trusted))

        # Not sent to the other ranks, for whose memory it may be too large.
        yield ranks.together(read if ranks.rank == 0 else lambda: None)


def _look(path: str, part: str, wanted: bool | None) -> Source:
    store = maybe_create_object_store_from_uri(path)
    if store is not None:
        reach(store, path)

    def exists(file: str) -> bool:
        return os.path.isfile(file) if store is None else has_object(store, parse_uri(file).path)

    is_folder = exists(posixpath.join(path, METADATA_NAME))
    if is_folder and wanted is not False:
        if store is None:
            return Source(path, is_sharded=True)
        if not isinstance(store, FsspecObjectStore):
            raise ValueError(
                f"{path} is a sharded checkpoint in a store whose files cannot be read in parts. Download the folder "
                f"with composer_checkpoint.remote.publish.fetch_checkpoint(), and load it from there."
            )
        return Source(store.get_uri(parse_uri(path).path), True, store.filesystem.storage_options)
    files = [path, *(posixpath.join(path, f"{part}.{suffix}") for suffix in _SUFFIXES)]
    file = next(filter(exists, files), None)
    if file is None and is_folder:
        raise ValueError(
            f"{path} is a sharded checkpoint, and sharded_checkpoint=False. Pass sharded_checkpoint=True, or None to "
            f"load either kind."
        )
    if file is None:
        raise NoCheckpointError(
            f"there is no checkpoint at {path!r}: neither this file nor a folder with {METADATA_NAME} or {part}.pt in "
            f"it. Check the path."
        )
    if wanted:
        raise ValueError(
            f"{file} is a file, and sharded_checkpoint=True: a sharded checkpoint is a folder with {METADATA_NAME}. "
            f"Name the folder, or pass sharded_checkpoint=None to load either kind."
        )
    return Source(file, is_sharded=False)


Path = tuple[str | int, ...]


def read_entries(source: Source) -> dict[Path, Any]:
    """Return the metadata of a folder's entries by their paths in the state dict.

    Every rank must call this; rank 0 reads.
    """

    def read() -> dict[Path, Any]:
        metadata = read_folder_metadata(source.path, storage_options=source.storage_options)
        paths = metadata.planner_data or {}
        return {paths.get(name, (name,)): entry for name, entry in metadata.state_dict_metadata.items()}

    return Ranks().from_first(read)


def _load_folder_into(state_dict: dict[str, Any], source: Source, options: CheckpointLoadOptions) -> None:
    storage, planner = source.storage_options, options.load_planner
    load_sharded(state_dict, source.path, strict=options.strict, storage_options=storage, planner=planner)


_NARROW = (torch.float16, torch.bfloat16)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, source: Source, options: CheckpointLoadOptions, *, trusted: bool
) -> None:
    """Load an optimizer's state from a folder, or from a file that rank 0 reads. Every rank must call this.

    The state is allocated like the parameters, so the optimizer need not have stepped.
    """
    if source.is_sharded:
        make = _maker(model, options.cpu_offload)
        saved = _read_folder(source, type(optimizer).__qualname__, make, options)
    else:
        prepare = partial(_state_of, source=source, class_name=type(optimizer).__qualname__)
        with read_on_rank_zero(source.path, prepare, trusted=trusted) as own:
            saved = receive_state(spread.TensorSender(own), model, cpu_offload=options.cpu_offload)
    if "state" in saved:
        converted = spread.cast_state(saved["state"], spread.as_dtype(options.precision), keep_counts=True)
        # Step counts in low precision become float32, since bfloat16, for example, cannot count past 256.
        whole = spread.map_tensors(
            converted, lambda value: value.float() if not value.dim() and value.dtype in _NARROW else value
        )
        saved = {**saved, "state": whole}
    groups: Any = saved.get("param_groups", ())
    # Not a torch optimizer, whose layout is its own, or numbered already, as in a plain optimizer's own state dict.
    if not groups or any(isinstance(parameter, int) for group in groups for parameter in group["params"]):
        optimizer.load_state_dict(saved)
        return
    optimizer.load_state_dict(_with_numbers(model, optimizer, saved, strict=options.strict))


Maker = Callable[[str, torch.Size, torch.dtype], torch.Tensor]


def _maker(model: nn.Module, cpu_offload: bool) -> Maker:
    parameters = spread.parameters_by_name(model)

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        parameter = parameters.get(name)
        if isinstance(parameter, DTensor) and parameter.shape == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        # Scalars, which are step counts, stay on the CPU, where torch's optimizers keep them.
        device = "cpu" if cpu_offload or parameter is None or not shape else parameter.device
        return torch.empty(shape, dtype=dtype, device=device)

    return make


def receive_state(sender: spread.TensorSender, model: nn.Module, *, cpu_offload: bool) -> dict[str, Any]:
    """Return rank 0's state, with tensors sharded like the parameters they belong to. Every rank must call this."""
    make = _maker(model, cpu_offload)

    def take(name: str, slot: spread.Slot) -> torch.Tensor:
        section, _, rest = name.partition("/")
        target = make(rest.partition("/")[0] if section == "state" else "", slot.shape, slot.dtype)
        sender.receive(slot, target)
        return target

    return spread.map_slots(sender.outline, take)


def _read_folder(source: Source, class_name: str, make: Maker, options: CheckpointLoadOptions) -> dict[str, Any]:
    entries = read_entries(source)
    whole_state: Path = ("state", "optimizers", class_name)  # path in the checkpoint of a full training state
    prefix = whole_state if any(path[:3] == whole_state for path in entries) else ()
    leaves: list[tuple[Path, Any]] = []
    for path, entry in entries.items():
        if path[: len(prefix)] != prefix:
            continue
        inner = path[len(prefix) :]
        value = None
        if isinstance(entry, TensorStorageMetadata):
            value = make(str(inner[1]) if inner[0] == "state" else "", entry.size, entry.properties.dtype)
        leaves.append((path, value))
    nested = unflatten(leaves)
    _load_folder_into(nested, source, options)
    for key in prefix:
        nested = nested[key]
    return {"state": {}, **nested} if "param_groups" in nested else nested  # a sharded checkpoint may lack empty dicts


def _state_of(content: Any, source: Source, class_name: str) -> dict[str, Any]:
    state = content.get("state") if isinstance(content, Mapping) else None
    if isinstance(state, Mapping) and "param_groups" not in content and "optimizers" in state:
        content = state["optimizers"].get(class_name)
    if not isinstance(content, dict):
        raise IncompatibleCheckpointError(
            f"{source.path} holds no state of {class_name}. Name the file of an optimizer, such as optim/optim.pt, or "
            f"of a whole training state with an optimizer of this class."
        )
    return content


def _with_numbers(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    known = {name for group in saved["param_groups"] for name in group["params"]}
    current = {name for group in names_as_saved(model, optimizer, known) for name in group}
    missing, unexpected = current - known, known - current
    if strict and (missing or unexpected):
        raise IncompatibleCheckpointError(
            f"the optimizer's parameters are not those of the checkpoint: {len(missing)} are not saved: "
            f"{first_few(sorted(missing))}; {len(unexpected)} are not optimized here: {first_few(sorted(unexpected))}. "
            f"Build the optimizer as it was saved, or pass strict=False to keep what the checkpoint does not have."
        )
    return with_numbers(model, optimizer, saved, strict=False)


_KEYWORDS = ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params")


def shard_model(model: nn.Module, options: CheckpointLoadOptions, seed: int) -> None:
    """Shard a model with `fully_shard`, in place. Every rank must call this.

    A module is sharded on its own if its attribute `_fsdp_wrap` is true or the model's `fsdp_wrap_fn` returns true for
    it; the rest is sharded together with the model. For weights on the device `meta`, memory is allocated for the
    shards, and `reset_parameters` of their modules initializes them.
    """
    if unwrap_model(model) is not model:
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, and shard_as_needed_during_load=True shards the model "
            f"inside. Pass the model without its wrapper."
        )
    keywords = _keywords(options)
    absent: list[Any] = [
        module
        for module in model.modules()
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
    # Inner modules first, since fully_shard() leaves out parameters that are sharded already.
    ask: Any = getattr(model, "fsdp_wrap_fn", lambda module: False)
    for module in reversed(list(model.modules())):
        wanted = getattr(module, "_fsdp_wrap", None)
        if module is not model and (ask(module) if wanted is None else wanted):
            fully_shard(module, **keywords)
    fully_shard(model, **keywords)
    if not absent:
        return
    device = next(weight.device_mesh.device_type for weight in model.parameters() if isinstance(weight, DTensor))
    # `to_empty` leaves memory uninitialized, and the checkpoint may lack some of these weights.
    with seed_context(seed):
        for module in absent:
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()


def follow_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Replace an optimizer's parameters by those of its model, which was sharded after the optimizer was built."""
    after = spread.parameters_by_name(model)
    replaced = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]


def _keywords(options: CheckpointLoadOptions) -> dict[str, Any]:
    config = options.fsdp_config
    if isinstance(config, Mapping):
        given = dict(config)  # fully_shard raises if it does not know an argument
    else:
        given = {name: getattr(config, name) for name in (*_KEYWORDS, "device_mesh") if hasattr(config, name)}
    mesh = options.device_mesh or given.pop("device_mesh", None) or given.pop("mesh", None)
    keywords = {name: value for name, value in given.items() if value is not None}
    return keywords if mesh is None else {**keywords, "mesh": mesh}


log = getLogger(__name__)


class WeightsMismatchError(IncompatibleCheckpointError, RuntimeError):
    """Raised if the weights do not fit the model."""


def load_weights(model: nn.Module, source: Source, options: CheckpointLoadOptions, *, trusted: bool) -> None:
    """Load weights from a folder, or from a file that rank 0 reads. Every rank must call this.

    No rank changes the model before all ranks have found all weights to be intact and of the right shape.
    """
    if source.is_sharded:
        _load_folder(model, source, options)
        return
    prepare = partial(_prepared, source=source, options=options)
    with read_on_rank_zero(source.path, prepare, trusted=trusted) as own:
        if Ranks().world_size == 1 and not is_sharded(model):
            # Compared first, since torch raises only after it has copied the weights that fit.
            _compare(model, spread.weights_of(model), own, options.strict)
            _load_named(model, own)
        else:
            _receive(model, spread.TensorSender(own), options.strict)


def _prepared(content: Any, source: Source, options: CheckpointLoadOptions) -> dict[str, Any]:
    state = content.get("state") if isinstance(content, Mapping) else None
    weights = state["model"] if isinstance(state, Mapping) and "model" in state else content
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise IncompatibleCheckpointError(
            f"{source.path} holds a {type(weights).__name__}, and no weights by name. Name the file of a model, such "
            f"as model/model.pt, or of a whole training state."
        )
    wanted = select_keys(weights, options.include_keys, options.ignore_keys)
    return spread.cast_state(wanted, spread.as_dtype(options.precision))


def _receive(model: nn.Module, sender: spread.TensorSender, strict: bool) -> None:
    targets = spread.weights_of(model)
    _compare(model, targets, sender.outline, strict)
    extra: dict[str, Any] = {}
    for name, value in sender.outline.items():
        if name not in targets:
            continue
        if isinstance(value, spread.Slot):
            sender.receive(value, targets[name])
        else:
            extra[name] = value
    _load_named(model, extra)


def _load_folder(model: nn.Module, source: Source, options: CheckpointLoadOptions) -> None:
    entries = read_entries(source)
    prefix = next(((*root,) for root in (("state", "model"), ()) if any(path[:-1] == root for path in entries)), ())
    saved = {path[-1]: entry for path, entry in entries.items() if path[:-1] == prefix}
    targets = select_keys(spread.weights_of(model), options.include_keys, options.ignore_keys)
    precision = spread.as_dtype(options.precision)
    readable = {
        name: _readable(target, saved.get(name), precision, options.cpu_offload) for name, target in targets.items()
    }
    nested: dict[str, Any] = readable
    for key in reversed(prefix):
        nested = {key: nested}
    _load_folder_into(nested, source, options)
    # Only weights that were not read directly into the model remain to be copied.
    for name, target in targets.items():
        if isinstance(target, torch.Tensor) and readable[name] is not target:
            target.copy_(readable[name].to(precision))
    _load_named(model, {name: readable[name] for name in targets if not isinstance(targets[name], torch.Tensor)})


def _readable(target: Any, entry: object, precision: torch.dtype, cpu_offload: bool) -> Any:
    """Return the tensor to read a saved weight into: the weight itself, or a buffer if values must be converted."""
    if not isinstance(target, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
        return target
    saved = entry.properties.dtype
    # Values of a wider dtype than `precision` must be rounded to it, even if the model has that dtype.
    if saved == target.dtype and (not saved.is_floating_point or torch.promote_types(saved, precision) == precision):
        return target
    on_host = cpu_offload and type(target) is torch.Tensor  # shards must stay on the device of their mesh
    return torch.empty_like(target, dtype=saved, device="cpu" if on_host else None)


def _load_named(model: nn.Module, named: Mapping[str, Any]) -> None:
    if named:
        names = spread.names_in_model(model)
        unwrap_model(model).load_state_dict({names.get(name, name): w for name, w in named.items()}, strict=False)


def _compare(model: nn.Module, targets: Mapping[str, Any], saved: Mapping[str, Any], strict: bool) -> None:
    missing = [name for name in targets if name not in saved]
    unexpected = [name for name in saved if name not in targets]
    differing = [
        f"{name} ({_shape(saved[name])} there and {_shape(target)} here)"
        for name, target in targets.items()
        if name in saved and _shape(saved[name]) != _shape(target)
    ]
    if differing or (strict and (missing or unexpected)):
        lists = [("missing", missing), ("unexpected", unexpected), ("of another shape", differing)]
        told = "; ".join(f"{len(names)} {how}: {first_few(names)}" for how, names in lists if names)
        raise WeightsMismatchError(
            f"Error(s) in loading state_dict for {type(unwrap_model(model)).__name__}: {told}. Build the model as it "
            f"was saved, or pass strict=False where names may differ."
        )
    for names, what in (
        (missing, "weights of the model are not in the checkpoint and stay as they are"),
        (unexpected, "weights of the checkpoint are not in the model and are ignored"),
    ):
        if names:
            log.warning("%d %s: %s", len(names), what, first_few(names))


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, spread.Slot | torch.Tensor) else None
