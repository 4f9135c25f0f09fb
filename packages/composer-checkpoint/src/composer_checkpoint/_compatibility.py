"""Comparison of a checkpoint with a model and its optimizers, before any weight is changed."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from logging import getLogger
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint._spread import group_names, names_in_model, parameters_by_name
from composer_checkpoint.errors import (
    IncompatibleCheckpointError,
    UnfittingOptimizerError,
    UnfittingWeightsError,
    first_few,
    shown,
)
from composer_dist.wrapping import canonical_name, unwrap_model
from composer_events.batches import ensure_tuple
from composer_events.state import State, named_by_class
from composer_time import Timestamp

log = getLogger(__name__)

_PREFIX = "module."  # put before names by DistributedDataParallel, and by a ComposerModel around its network


def refuse_another_model(state: State, saved: dict[str, Any], path: str, *, strict: bool, leaves_out: bool) -> None:
    """Refuse weights that do not fit the model, unless algorithms will change the model.

    Error messages use the names of the checkpoint, so that they can be copied into `load_ignore_keys`. Modules with
    custom loading are not compared. With `leaves_out`, weights of another shape are removed from `saved` instead.
    """
    weights = saved.get("model")
    if state.deepspeed_enabled or not weights:  # DeepSpeed's engine compares them itself
        return
    if not isinstance(weights, dict):
        raise _misshapen(path, "state/model", weights, "a dict of weights")
    # Algorithms of the checkpoint may change the model before the weights are loaded, so it cannot be compared yet.
    if saved.get("algorithms") or not isinstance(state.model, nn.Module):
        return
    values, apart = unwrap_model(state.model).state_dict(), _loading_in_their_own_way(state.model)
    own = {name: values[name_here] for name, name_here in names_in_model(state.model).items()}
    names = _names_as_loaded(weights, saved, state)
    error = f"Error(s) in loading state_dict for {type(unwrap_model(state.model)).__name__}: {path} is of another model"
    # First, since without any common name the lists of missing and unexpected weights would hide the cause.
    if own and _are_disjoint(own, names, may_differ_in_prefix="" in apart):
        raise UnfittingWeightsError(
            f"{error}: not one of its {len(names)} weights ({', '.join(sorted(map(str, names.values()))[:5])}, ...) is "
            f"among the {len(own)} of this model ({', '.join(sorted(own)[:5])}, ...). Load it into the model that it "
            f"was saved from.{advice_for_hugging_face(path)}"
        )
    missing, unexpected, differing = _differences(own, names, weights, apart)
    if differing and leaves_out:
        _leave_out(differing, saved, path)
    elif differing or (strict and (missing or unexpected)):
        lists = (
            ("not in the checkpoint", missing),
            ("not in the model", unexpected),
            ("of another shape or kind", differing.values()),
        )
        raise UnfittingWeightsError(
            f"{error}. Weights {_described(lists)}. Nothing was changed. Load it into the model that it was saved "
            f"from, or load what fits with load_weights_only=True and load_strict_model_weights=False."
        )


def _leave_out(differing: Mapping[Any, str], saved: dict[str, Any], path: str) -> None:
    saved["model"] = {name: value for name, value in saved["model"].items() if name not in differing}
    words = len(differing), path, first_few(differing.values())
    log.warning("%d weights of %s have another shape in the model and are left out: %s", *words)


def _described(lists: Iterable[tuple[str, Collection[str]]]) -> str:
    return "; ".join(f"{len(names)} {what}: {first_few(names)}" for what, names in lists if names)


def _differences(
    own: Mapping[str, Any], names: Mapping[str, Any], weights: Mapping[Any, Any], apart: tuple[str, ...]
) -> tuple[list[str], list[str], dict[Any, str]]:
    """Return missing, unexpected and differing weights, except those with a prefix in `apart`."""
    own = {name: value for name, value in own.items() if not name.startswith(apart)}
    theirs = {name: saved_name for name, saved_name in names.items() if not name.startswith(apart)}
    # Torch before 0.4.1 did not save `num_batches_tracked`, and current torch does not require it.
    missing = [name for name in own if name not in theirs and not name.endswith("num_batches_tracked")]
    unexpected = [str(saved_name) for name, saved_name in theirs.items() if name not in own]
    both = {saved_name: (weights[saved_name], own[name]) for name, saved_name in theirs.items() if name in own}
    differing = {name: f"{name} ({how})" for name, pair in both.items() if (how := _difference(*pair)) is not None}
    return missing, unexpected, differing


def _are_disjoint(one: Iterable[str], other: Iterable[str], *, may_differ_in_prefix: bool) -> bool:
    if may_differ_in_prefix:  # a model that loads weights in its own way may add or remove it
        one, other = map(_without_prefix, one), map(_without_prefix, other)
    return {*one}.isdisjoint(other)


def _difference(theirs: Any, own: Any) -> str | None:
    if not isinstance(own, torch.Tensor) or nn.parameter.is_lazy(own):
        return None  # extra state, or a lazy parameter, which has no shape yet
    if not isinstance(theirs, torch.Tensor):
        return f"{type(theirs).__name__} in the checkpoint, a tensor in the model"
    shape = () if own.dim() == 0 and theirs.shape == (1,) else tuple(theirs.shape)  # torch before 0.4 saved scalars so
    if shape != tuple(own.shape):
        return f"{tuple(theirs.shape)} in the checkpoint, {tuple(own.shape)} in the model"
    if _kind(theirs.dtype) != _kind(own.dtype):  # weights are converted between floating point dtypes
        return f"{theirs.dtype} in the checkpoint, {own.dtype} in the model"
    return None


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "whole"


def _loading_in_their_own_way(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of modules that rename or convert weights when they load, which cannot be compared."""
    model = unwrap_model(model)
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return ("",)
    return tuple(
        canonical_name(f"{name}.") if name else ""
        for name, part in model.named_modules()
        # Torch has no public accessor for the hooks that `register_load_state_dict_pre_hook` adds.
        if part._load_state_dict_pre_hooks or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")
    )


def _names_as_loaded(weights: Iterable[Any], saved: Mapping[str, Any], state: State) -> dict[str, Any]:
    """Return the saved names by those that are loaded: without DDP's prefix if the model is no longer in DDP."""
    was_ddp = any(saved.get(key) for key in ("is_model_ddp", "_is_model_ddp", "_is_model_ddp_wrapped"))
    plain = _without_prefix if was_ddp and not state.is_model_ddp else str
    return {canonical_name(plain(str(name))): name for name in weights}


def _without_prefix(name: str) -> str:
    return name.removeprefix(_PREFIX)


def advice_for_hugging_face(path: str) -> str:
    """Return advice, with a leading space, if a path is the folder of a Hugging Face model or a file in it, else ""."""
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return ""
    return (
        f" It seems to hold a Hugging Face model. Convert it with composer-ckpt convert {folder} x.pt, and load x.pt "
        f"with load_weights_only=True."
    )


def refuse_unfitting_state(state: State, saved: Mapping[str, Any], path: str) -> None:
    """Refuse a training state with parts that would fail to load after the weights were already changed."""
    _refuse_other_types(saved, path)
    timestamps: Any = saved.get("timestamp") or {}
    try:
        _read_time(timestamps)
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleCheckpointError(
            f"{path} has no valid time in training: its state/timestamp/Timestamp is invalid: {error} "
            f"Nothing was changed. Load another checkpoint, or its weights with load_weights_only=True."
        ) from error
    # DeepSpeed compares its own optimizer state, and algorithms that are applied first may change the parameter groups.
    if state.deepspeed_enabled or saved.get("algorithms") or not isinstance(state.model, nn.Module):
        return
    optimizers: Mapping[str, Any] = saved.get("optimizers") or {}
    for name, optimizer in named_by_class(ensure_tuple(state.optimizers)):
        if optimizers.get(name) is not None and isinstance(optimizer, torch.optim.Optimizer):
            _refuse_another_optimizer(state.model, optimizer, name, optimizers[name], path)


def _refuse_other_types(saved: Mapping[str, Any], path: str) -> None:
    for name in ("optimizers", "timestamp", "dataset_state"):
        if saved.get(name) and not isinstance(saved[name], Mapping):
            raise _misshapen(path, f"state/{name}", saved[name], "a dict")
    algorithms: Any = saved.get("algorithms") or []
    if not isinstance(algorithms, Mapping) and not _is_list(
        algorithms, lambda pair: _is_list(pair) and len(pair) == 2 and isinstance(pair[0], str)
    ):
        raise _misshapen(path, "state/algorithms", algorithms, "a list of names with their states")


def _read_time(timestamps: Mapping[str, Any]) -> None:
    if "Timestamp" not in timestamps:
        return  # the loader warns about that
    timestamp = Timestamp()  # loaded for its checks only
    timestamp.load_state_dict(dict(timestamps["Timestamp"]))
    counts = {name: value for name, value in timestamp.state_dict().items() if isinstance(value, int)}
    if negative := {name: value for name, value in counts.items() if value < 0}:
        raise ValueError(f"{negative} is before the beginning")


def _refuse_another_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, saved: Any, path: str
) -> None:
    if isinstance(saved, Mapping) and "param_groups" not in saved:
        return  # an optimizer with its own layout
    groups, saved_names = _parameters_in(saved, f"state/optimizers/{name}", path)
    words = ""
    # Old checkpoints number the parameters, so only the sizes of the groups can be compared.
    if any(isinstance(parameter, int) for parameter in saved_names):
        sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (optimizer.param_groups, groups))
        words = f"has groups of {saved_sizes} parameters, and now of {sizes}" if sizes != saved_sizes else ""
    # Torch has its own rules for loading sharded parameters.
    elif not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        words = _different_names(model, optimizer, {canonical_name(str(saved_name)) for saved_name in saved_names})
    if words:
        raise UnfittingOptimizerError(
            f"{path} was saved with an optimizer of other parameters: its {name} {words}. Nothing was changed. Restore "
            f"the model and the optimizer that it was saved with, or load the weights alone with "
            f"load_weights_only=True."
        )


def _parameters_in(saved: Any, where: str, path: str) -> tuple[Sequence[Any], list[Any]]:
    """Return the groups of a saved optimizer, and the names or numbers of its parameters."""
    groups: Any = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not _is_list(groups, lambda group: isinstance(group, Mapping) and _is_list(group.get("params"))):
        raise _misshapen(path, f"{where}/param_groups", groups, "a list of dicts with 'params'")
    saved_names: list[Any] = [parameter for group in groups for parameter in group["params"]]
    of_parameters: Any = saved.get("state")
    if not isinstance(of_parameters, Mapping) or not _is_list(
        saved_names, lambda parameter: isinstance(of_parameters.get(parameter, {}), Mapping)
    ):
        raise _misshapen(path, f"{where}/state", of_parameters, "a dict with a dict for each parameter")
    return groups, saved_names


def _different_names(model: nn.Module, optimizer: torch.optim.Optimizer, saved_names: set[str]) -> str:
    # A tied weight may be saved under any of its names.
    aliases: dict[int, set[str]] = {}
    for alias, parameter in parameters_by_name(model).items():
        aliases.setdefault(id(parameter), set()).add(alias)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # In the order of the parameters: `group_names` has one name for each.
    first_names = [first_name for group in group_names(model, optimizer) for first_name in group]
    own = {
        first_name: aliases.get(id(parameter), {first_name})
        for first_name, parameter in zip(first_names, parameters, strict=True)
    }
    missing = sorted(first_name for first_name, names in own.items() if names.isdisjoint(saved_names))
    unexpected = sorted(saved_names.difference(*own.values()))
    if missing:
        return f"has no state of {missing[0]!r} ({len(missing)} such parameters in all), which is optimized now"
    if unexpected:
        return f"has the parameter {shown(unexpected[0])} ({len(unexpected)} in all), which is not optimized now"
    return ""


def _misshapen(path: str, where: str, value: object, expected: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"{path} is not a training state: its {where} is {shown(value)}, and should be {expected}. Nothing was "
        f"changed. Load another checkpoint, or leave that out with load_ignore_keys=[{where!r}]."
    )


def _is_list(value: Any, is_item: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(is_item, value))
