"""Model, optimizer and metric states in checkpoints, with parameters identified by name."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from composer_events.parallelism import any_rank, gather, is_sharded, is_wrapper


def get_optimizer_state(model: Any, optimizer: Any, state_dict_type: str | None) -> dict[str, Any]:
    """Collect an optimizer's state, with parameters identified by name.

    An optimizer that has not stepped has no state and is saved without one: torch's own function would step it to
    create state, which leaves Adam's step count at 1.

    Args:
        model: Its parameter names are used.
        optimizer: A torch optimizer; the state of any other object is returned unchanged.
        state_dict_type: `'full'` gathers a sharded state on rank 0's host, other ranks get nothing; `'sharded'` gives
            every rank its shard on the host. Every rank must call this with both.
    """
    if is_sharded(model) and any(optimizer.state.values()):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return cast(
            "dict[str, Any]", get_optimizer_state_dict(model, optimizer, options=sharded_options(state_dict_type))
        )
    saved: dict[str, Any] = optimizer.state_dict()
    if "param_groups" not in saved:
        return saved
    return with_names(saved, names_of_groups(model, optimizer))


def set_optimizer_state(
    model: Any,
    optimizer: Any,
    saved: Mapping[str, Any],
    state_dict_type: str | None,
    *,
    strict: bool = True,
    broadcast: bool = False,
) -> None:
    """Load the result of `get_optimizer_state`, or an optimizer's own `state_dict`.

    Args:
        model: Its parameter names are used.
        optimizer: Changed in place.
        saved: Parameters by name, or by number in the order of the groups. Not changed.
        state_dict_type: The type with which it was saved.
        strict: Whether missing or unexpected parameters are an error; otherwise they are skipped.
        broadcast: Whether only rank 0 has the state of a sharded model.
    """
    has_state = bool(saved.get("state"))
    if broadcast:
        has_state = any_rank(has_state)  # collective, so that all ranks take the same branch below
        if not has_state and not saved:
            return  # rank 0 has only the settings of an optimizer that had not stepped, so it sends nothing
    if is_sharded(model) and has_state:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        named: Any = with_names(saved, names_of_groups(model, optimizer)) if _is_numbered(saved) else dict(saved)
        without = _without_state(model, optimizer, named)
        if broadcast:
            without = gather(without)[0]
        options = sharded_options(state_dict_type, strict=strict and not without, broadcast=broadcast)
        base = getattr(optimizer, "base_optimizer", None)
        has_base = base is not None and base.state is optimizer.state
        # torch creates missing state by a step without a closure, which fails for an optimizer such as SAM.
        loaded: Any = base if has_base else optimizer
        _make_ready_to_step(loaded)
        set_optimizer_state_dict(model, loaded, named, options=options)
        for place in without:  # torch's step created state for them, but they have not been stepped
            loaded.state.pop(_parameters(optimizer)[place], None)
        if has_base:
            # Loading has replaced state and groups of the base optimizer; this links the wrapper to them again.
            optimizer.load_state_dict(loaded.state_dict())
    elif "param_groups" not in saved or _is_numbered(saved):
        optimizer.load_state_dict(dict(saved))
    else:
        optimizer.load_state_dict(with_numbers(model, optimizer, saved, strict=strict))


def _make_ready_to_step(optimizer: Any) -> None:
    """Switch a schedule-free optimizer without state to the mode in which torch can step it to create some."""
    if hasattr(optimizer, "train") and not any(optimizer.state.values()):
        optimizer.train()
        optimizer.state.clear()  # of the empty entries that `train` leaves for each parameter


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _without_state(model: Any, optimizer: Any, named: Mapping[str, Any]) -> list[int]:
    """Return the positions of trained parameters that the saved optimizer lists but has no state for."""
    known = {name for group in named.get("param_groups", ()) for name in group["params"]} - {*named.get("state", ())}
    names = [name for group in names_of_groups(model, optimizer) for name in group]
    parameters = zip(_parameters(optimizer), names, strict=True)
    return [place for place, (parameter, name) in enumerate(parameters) if parameter.requires_grad and name in known]


def names_of_groups(model: Any, optimizer: Any) -> list[list[str]]:
    """Return the names of the parameters in each of an optimizer's groups; the first name of a tied parameter.

    A parameter that does not belong to the model, such as that of a loss function, is named by its position.
    """
    names: dict[int, str] = {}
    for name, parameter in unwrapped(model).named_parameters():
        names.setdefault(id(parameter), canonical_name(name))
    return [
        [names.get(id(parameter), f"param_groups.{g}.{i}") for i, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def _is_numbered(saved: Mapping[str, Any]) -> bool:
    groups: Sequence[Mapping[str, Any]] = saved.get("param_groups", ())
    return any(isinstance(parameter, int) for group in groups for parameter in group["params"])


def with_names(saved: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state dict with names instead of numbers for the parameters."""
    groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group) for group in names]:
        raise ValueError(
            f"The saved optimizer state has parameter groups of {[len(group['params']) for group in groups]} "
            f"parameters, and the optimizer has groups of {[len(group) for group in names]}. Build the optimizer as "
            f"it was when the checkpoint was written, or load the weights only."
        )
    name_of = {
        number: name
        for group, group_names in zip(groups, names, strict=True)
        for number, name in zip(group["params"], group_names, strict=True)
    }
    state: Mapping[Any, Any] = saved["state"]
    return {
        **saved,
        "state": {name_of.get(key, key): value for key, value in state.items()},
        "param_groups": [
            {**group, "params": list(group_names)} for group, group_names in zip(groups, names, strict=True)
        ],
    }


def with_numbers(model: Any, optimizer: Any, saved: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return a saved state with the parameters numbered as the optimizer numbers them."""
    saved_state: dict[Any, Any] = {
        canonical_name(key) if isinstance(key, str) else key: value for key, value in saved["state"].items()
    }
    group_of: dict[str, Mapping[str, Any]] = {
        canonical_name(name): group for group in saved["param_groups"] for name in group["params"]
    }
    names = names_as_saved(model, optimizer, group_of)
    if strict:
        _refuse_mismatch([name for group in names for name in group], group_of)
    # Parameters that the checkpoint does not have keep their current state.
    own: Mapping[str, Any] = optimizer.state_dict()

    state = {key: value for key, value in saved_state.items() if key not in group_of}
    groups: list[dict[str, Any]] = []
    for own_group, group_names in zip(own["param_groups"], names, strict=True):
        # A group takes the saved settings of any of its parameters; a new group keeps its own.
        settings = next((group_of[name] for name in group_names if name in group_of), own_group)
        groups.append({**settings, "params": own_group["params"]})
        for number, name in zip(own_group["params"], group_names, strict=True):
            if name in saved_state:
                state[number] = saved_state[name]
            elif name not in group_of and number in own["state"]:
                state[number] = own["state"][number]
    return {**saved, "state": state, "param_groups": groups}


def names_as_saved(model: Any, optimizer: Any, known: Collection[str]) -> list[list[str]]:
    """Return the names in each group, where a tied parameter has its name in the checkpoint."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(canonical_name(name))
    chosen = {names[0]: next((name for name in names if name in known), names[0]) for names in aliases.values()}
    return [[chosen.get(name, name) for name in group] for group in names_of_groups(model, optimizer)]


def _refuse_mismatch(current: Collection[str], saved: Collection[str]) -> None:
    advice = "Restore the model and the optimizer that the checkpoint was written with, or load the weights only."
    if unsaved := sorted(set(current) - set(saved)):
        raise KeyError(
            f"The parameter {unsaved[0]!r} ({len(unsaved)} in all) is optimized now, and the saved optimizer state "
            f"does not have it. {advice}"
        )
    if unknown := sorted(set(saved) - set(current)):
        raise KeyError(
            f"The saved optimizer state has the parameter {unknown[0]!r} ({len(unknown)} in all), which is not "
            f"optimized now. {advice}"
        )


def get_metric_states(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the state of torchmetrics metrics by name."""
    states: dict[str, Any] = {}
    for name, metric in metrics.items():
        metric.persistent(True)  # torchmetrics leaves the accumulated values out of state_dict otherwise
        states[name] = {"state_dict": metric.state_dict(), "_computed": getattr(metric, "_computed", None)}
    return states


def set_metric_states(metrics: Mapping[str, Any], states: Mapping[str, Any], device: Any) -> None:
    """Load the result of `get_metric_states` into the metrics of the same names; others are skipped.

    The formats of older checkpoints are supported: whole metric objects (up to 0.13.5), and NumPy arrays instead of
    tensors (0.14 to 0.16).
    """
    for name, metric in metrics.items():
        if name not in states:
            continue
        saved: Any = states[name]
        if isinstance(saved, Mapping):
            values = cast("Mapping[str, Any]", saved["state_dict"])
            state_dict = {key: _to_tensor(value) for key, value in values.items()}
            computed = _to_tensor(cast("Mapping[str, Any]", saved).get("_computed"))
        else:
            saved.persistent(True)
            state_dict, computed = dict(saved.state_dict()), getattr(saved, "_computed", None)
        metric.persistent(True)
        incompatible = metric.load_state_dict(state_dict, strict=False)
        for kind, keys in (("lacks", incompatible.missing_keys), ("has unknown", incompatible.unexpected_keys)):
            if keys:
                warnings.warn(
                    f"The saved state of the metric {name!r} {kind} values {list(keys)}. They are not restored, and "
                    f"keep their initial values.",
                    UserWarning,
                    stacklevel=2,
                )
        metric._computed = computed
        metric._update_count += 1  # otherwise compute() warns about a metric without updates
        if hasattr(device, "module_to_device"):
            device.module_to_device(metric)


def _to_tensor(value: Any) -> Any:
    # By the name of the module, so that NumPy is not imported only for this check.
    if type(value).__module__ != "numpy":
        return value
    import torch

    return torch.as_tensor(value)


log = logging.getLogger("composer.core.state")

# Names under which torch.compile and activation checkpointing store the wrapped module. This package does not depend
# on composer-dist, whose names higher packages use.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def unwrapped(model: Any) -> Any:
    """Remove DDP, DataParallel, DeepSpeed's engine and `torch.compile`, in any order.

    Higher packages use `composer_dist.unwrap_model` for this; this package does not depend on composer-dist.
    """
    while True:
        if is_wrapper(model):
            model = model.module
        elif "_orig_mod" in getattr(model, "_modules", ()):
            model = model._orig_mod
        else:
            return model


def canonical_name(name: str) -> str:
    """Remove the wrappers' parts from a parameter's name."""
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


def get_model_state(model: Any, state_dict_type: str | None) -> dict[str, Any]:
    """Collect the weights by name.

    Args:
        model: If it is not sharded, the result holds its own tensors, not copies.
        state_dict_type: `'full'` gathers a sharded model on rank 0's host, other ranks get nothing; `'sharded'`
            gives every rank its shard on the host. Every rank must call this with both.
    """
    if is_sharded(model):
        # For sharded models only: this import takes longer than saving a small model.
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return cast("dict[str, Any]", get_model_state_dict(model, options=sharded_options(state_dict_type)))
    weights: dict[str, Any] = unwrapped(model).state_dict()
    if all(canonical_name(name) == name for name in weights):
        return weights
    return OrderedDict((canonical_name(name), value) for name, value in weights.items())


def set_model_state(
    model: Any, weights: Mapping[str, Any], state_dict_type: str | None, *, strict: bool, broadcast: bool
) -> None:
    """Load weights by name."""
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        options = sharded_options(state_dict_type, strict=strict, broadcast=broadcast)
        incompatible: Any = set_model_state_dict(model, dict(weights), options=options)
    else:
        target = unwrapped(model)
        wrapped_names = {canonical_name(name): name for name in target.state_dict()}
        renamed = {wrapped_names.get(canonical_name(name), name): value for name, value in weights.items()}
        incompatible = target.load_state_dict(renamed, strict=strict)
    _log_first("%d weights of the model are not in the checkpoint and stay as they are: %s", incompatible.missing_keys)
    _log_first(
        "%d weights of the checkpoint are not in the model and are passed over: %s", incompatible.unexpected_keys
    )


def _log_first(message: str, names: Sequence[str]) -> None:
    if names:
        log.warning(message, len(names), ", ".join(names[:10]))


def sharded_options(state_dict_type: str | None, *, strict: bool = True, broadcast: bool = False) -> Any:
    """Return torch's options for saving and loading a sharded model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    if state_dict_type not in ("full", "sharded"):
        raise NotImplementedError(
            f"fsdp_state_dict_type={state_dict_type!r} is not a way to save a sharded model. Use 'full', one "
            f"checkpoint on rank 0, or 'sharded', one part on each rank."
        )
    return StateDictOptions(
        full_state_dict=state_dict_type == "full", cpu_offload=True, strict=strict, broadcast_from_rank0=broadcast
    )
