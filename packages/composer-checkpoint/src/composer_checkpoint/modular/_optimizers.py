"""Loading an optimizer's state by the names of parameters, however they are spread."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.modular._dcp import Path, load_folder, read_entries
from composer_checkpoint.modular._names import group_names, parameters_by_name
from composer_checkpoint.modular._sources import Source, read_on_rank_zero
from composer_checkpoint.modular._spreading import Slot, TensorSender, map_slots
from composer_checkpoint.modular._values import as_dtype, cast_state
from composer_checkpoint.modular.options import CheckpointLoadOptions

__all__ = ["load_optimizer", "receive_state"]

_MAX_LISTED = 10
_NARROW = (torch.float16, torch.bfloat16)


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Source,
    options: CheckpointLoadOptions,
    *,
    trusted: bool,
) -> None:
    """Load an optimizer's state from a file, which rank 0 reads, or from a folder. Every rank must call this.

    What is not in memory yet is made as the parameters are: the optimizer need not have stepped.
    """
    if source.is_sharded:
        make = _maker(model, options.cpu_offload)
        saved = _read_folder(source, type(optimizer).__qualname__, make, options)
    else:
        prepare = partial(_state_of, source=source, class_name=type(optimizer).__qualname__)
        with read_on_rank_zero(source.path, prepare, trusted=trusted) as own:
            saved = receive_state(TensorSender(own), model, cpu_offload=options.cpu_offload)
    if "state" in saved:
        converted = cast_state(saved["state"], as_dtype(options.precision), keep_counts=True)
        saved = {**saved, "state": _with_whole_counts(converted)}
    if "param_groups" not in saved:
        optimizer.load_state_dict(saved)  # of another kind, with a layout of its own
        return
    optimizer.load_state_dict(_with_numbers(model, optimizer, saved, strict=options.strict))


Maker = Callable[[str, torch.Size, torch.dtype], torch.Tensor]


def _maker(model: nn.Module, cpu_offload: bool) -> Maker:
    """Return what makes room for a tensor of a parameter's state: spread as the parameter is, if it has its shape."""
    parameters = parameters_by_name(model)

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        parameter = parameters.get(name)
        if isinstance(parameter, DTensor) and parameter.shape == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        device = "cpu" if cpu_offload or parameter is None or not shape else parameter.device
        return torch.empty(shape, dtype=dtype, device=device)

    return make


def receive_state(sender: TensorSender, model: nn.Module, *, cpu_offload: bool) -> dict[str, Any]:
    """Return rank 0's state with tensors spread as the parameters are that they belong to. Every rank must call this.

    Args:
        sender: Of a state with names for parameters.
        model: Has the parameters.
        cpu_offload: Whether what is not sharded stays on the host.
    """
    make = _maker(model, cpu_offload)

    def take(name: str, slot: Slot) -> torch.Tensor:
        section, _, rest = name.partition("/")
        target = make(rest.partition("/")[0] if section == "state" else "", slot.shape, slot.dtype)
        sender.receive(slot, target)
        return target

    return map_slots(sender.outline, take)


def _read_folder(source: Source, class_name: str, make: Maker, options: CheckpointLoadOptions) -> dict[str, Any]:
    entries = read_entries(source)
    whole_state: Path = ("state", "optimizers", class_name)  # where a whole training state has it
    prefix = whole_state if any(path[:3] == whole_state for path in entries) else ()
    nested: Any = {}
    for path, entry in entries.items():
        if path[: len(prefix)] != prefix:
            continue
        inner = path[len(prefix) :]
        value = None
        if isinstance(entry, TensorStorageMetadata):
            value = make(str(inner[1]) if inner[0] == "state" else "", entry.size, entry.properties.dtype)
        _put(nested, path, value)
    load_folder(nested, source, strict=options.strict, planner=options.load_planner)
    for key in prefix:
        nested = nested[key]
    return {"state": {}, **nested} if "param_groups" in nested else nested  # empty dicts are not listed


def _put(nested: Any, path: Path, value: Any) -> None:
    """Put a value at a place in nested dicts and lists, which are made as the place needs them."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        child = value if following is None else ([] if isinstance(following, int) else {})
        if isinstance(key, int):
            nested.extend([None] * (key + 1 - len(nested)))
            nested[key] = child if nested[key] is None else nested[key]
            nested = nested[key]
        else:
            nested = nested.setdefault(key, child)


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


def _with_whole_counts(state: Any) -> Any:
    """Give counts of steps that were saved in few bits the dtype in which optimizers count."""

    def widen(value: Any) -> Any:
        is_count = isinstance(value, torch.Tensor) and not value.dim() and value.dtype in _NARROW
        return value.float() if is_count else value

    return {
        name: {key: widen(value) for key, value in entries.items()} if isinstance(entries, dict) else entries
        for name, entries in state.items()
    }


def _with_numbers(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """Return the state with numbers for parameters, as the optimizer counts them."""
    own: dict[str, Any] = optimizer.state_dict()
    if any(isinstance(parameter, int) for group in saved["param_groups"] for parameter in group["params"]):
        return dict(saved)  # it has numbers
    group_of = {name: group for group in saved["param_groups"] for name in group["params"]}
    names = _as_saved(model, optimizer, group_of)
    if strict:
        _refuse_mismatch([name for group in names for name in group], group_of)
    state: dict[Any, Any] = {key: value for key, value in saved["state"].items() if key not in group_of}
    groups: list[dict[str, Any]] = []
    for own_group, group in zip(own["param_groups"], names, strict=True):
        settings = next((group_of[name] for name in group if name in group_of), own_group)
        groups.append({**settings, "params": own_group["params"]})
        for number, name in zip(own_group["params"], group, strict=True):
            if name in saved["state"]:
                state[number] = saved["state"][name]
            elif name not in group_of and number in own["state"]:
                state[number] = own["state"][number]  # not in the checkpoint: it stays as it is
    return {**saved, "state": state, "param_groups": groups}


def _as_saved(model: nn.Module, optimizer: torch.optim.Optimizer, known: Mapping[str, Any]) -> list[list[str]]:
    """Return the names in the groups; of a tied parameter's, the one that the checkpoint has."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in parameters_by_name(model).items():
        aliases.setdefault(id(parameter), []).append(name)
    chosen = {names[0]: next((name for name in names if name in known), names[0]) for names in aliases.values()}
    return [[chosen.get(name, name) for name in group] for group in group_names(model, optimizer)]


def _refuse_mismatch(current: list[str], saved: Mapping[str, Any]) -> None:
    missing = [name for name in current if name not in saved]
    unexpected = [name for name in saved if name not in set(current)]
    if missing or unexpected:
        raise IncompatibleCheckpointError(
            f"the optimizer's parameters are not those of the checkpoint: {len(missing)} are not saved: "
            f"{', '.join(missing[:_MAX_LISTED])}; {len(unexpected)} are not optimized here: "
            f"{', '.join(unexpected[:_MAX_LISTED])}. Build the optimizer as it was saved, or pass strict=False to keep "
            f"what the checkpoint does not have."
        )
