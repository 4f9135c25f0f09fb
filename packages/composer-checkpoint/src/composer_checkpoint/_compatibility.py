"""Comparison of a checkpoint with a model and its optimizers, before any weight is changed."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint.errors import (
    IncompatibleCheckpointError,
    UnfittingOptimizerError,
    UnfittingWeightsError,
    shown,
)
from composer_checkpoint.modular._spread import group_names, names_in_model, parameters_by_name
from composer_dist.wrapping import canonical_name, unwrap_model
from composer_events.batches import ensure_tuple
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer_events import State

__all__ = [
    "hint_for_file",
    "refuse_hugging_face_folder",
    "refuse_another_model",
    "named_optimizers",
    "refuse_unfitting_state",
]

log = getLogger(__name__)

_MAX_NAMES = 10
_PREFIX = "module."  # put before names by DistributedDataParallel, and by a ComposerModel around its network


def refuse_another_model(state: "State", saved: dict[str, Any], path: str, *, strict: bool, leaves_out: bool) -> None:
    """Refuse weights that do not fit the model, unless algorithms will change the model.

    Error messages use the names of the checkpoint, so that they can be copied into `load_ignore_keys`. Modules with
    custom loading are not compared.

    Args:
        state: Holds the model.
        saved: The checkpoint's `state`. Weights that are left out are removed from it.
        path: The checkpoint, for the message.
        strict: Whether missing and unexpected names are an error.
        leaves_out: Whether weights of another shape are left out instead of raising an error.
    """
    weights = saved.get("model")
    if state.deepspeed_enabled or not weights:  # DeepSpeed's engine compares them itself
        return
    if not isinstance(weights, dict):
        raise _misshapen(path, "state/model", weights, "a dict of weights")
    # Algorithms of the checkpoint may change the model before the weights are loaded, so it cannot be compared yet.
    if saved.get("algorithms") or not isinstance(state.model, nn.Module):
        return
    own, theirs = _own_weights(state.model), {_as_loaded(str(name), saved, state): name for name in weights}
    apart, model = _loading_in_their_own_way(state.model), type(unwrap_model(state.model)).__name__
    # First, since without any common name the lists of missing and unexpected weights would hide the cause.
    _refuse_other_names(own, theirs, path, model, compares_prefix="" not in apart)
    fit = _compare(own, {plain: (str(name), weights[name]) for plain, name in theirs.items()}, apart)
    if fit.differing and leaves_out:
        left_out = {theirs[name] for name in fit.differing}
        saved["model"] = {name: value for name, value in weights.items() if name not in left_out}
        words = len(left_out), path, _listed(fit.differing.values())
        log.warning("%d weights of %s have another shape in the model and are left out: %s", *words)
    elif fit.differing or (strict and fit.has_other_names):
        raise UnfittingWeightsError(fit.describe(path, model))


def _own_weights(model: nn.Module) -> dict[str, Any]:
    values = unwrap_model(model).state_dict()
    return {name: values[name_here] for name, name_here in names_in_model(model).items()}


def _refuse_other_names(
    own: Mapping[str, Any], theirs: Mapping[str, Any], path: str, model: str, *, compares_prefix: bool
) -> None:
    """Refuse weights if none of them is in the model."""
    if compares_prefix:
        _refuse_another_prefix(own, theirs, path, model)
    if own and {*map(_without_prefix, own)}.isdisjoint(map(_without_prefix, theirs)):
        raise UnfittingWeightsError(
            f"Error(s) in loading state_dict for {model}: {path} is of another model: not one of its {len(theirs)} "
            f"weights ({', '.join(sorted(map(str, theirs.values()))[:5])}, ...) is among the {len(own)} of this model "
            f"({', '.join(sorted(own)[:5])}, ...). Load it into the model that it was saved from."
            f"{hint_for_file(path, theirs, own)}"
        )


@dataclass(frozen=True, slots=True)
class _Fit:
    missing: list[str]
    unexpected: list[str]
    differing: Mapping[str, str]

    @property
    def has_other_names(self) -> bool:
        return bool(self.missing or self.unexpected)

    def describe(self, path: str, model: str) -> str:
        lists = (
            ("not in the checkpoint", self.missing),
            ("not in the model", self.unexpected),
            ("of another shape or kind", self.differing.values()),
        )
        words = "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in lists if names)
        return (
            f"Error(s) in loading state_dict for {model}: {path} is of another model. Weights {words}. Nothing was "
            f"changed. Load it into the model that it was saved from, or load what fits with load_weights_only=True "
            f"and load_strict_model_weights=False."
        )


def _refuse_another_prefix(own: Iterable[str], theirs: Mapping[str, Any], path: str, model: str) -> None:
    """Refuse names that differ from the model's only by the prefix `module.`."""
    own = {*own}
    if not own.isdisjoint(theirs):
        return
    lacking = [name for name in theirs if _PREFIX + name in own]
    surplus = [name for name in theirs if name.startswith(_PREFIX) and _without_prefix(name) in own]
    if lacking:
        name = lacking[0]
        raise UnfittingWeightsError(
            f"Error(s) in loading state_dict for {model}: {len(lacking)} of the {len(theirs)} weights in {path} are "
            f"those of this model without the prefix {_PREFIX!r}: {theirs[name]!r} is {_PREFIX + name!r} here. They "
            f"were saved from the network inside it. Nothing was changed. Load the file into that network, with "
            f"model.module.load_state_dict(load_file({path!r})['state']['model']), or save it from the {model}."
        )
    if surplus:
        name = surplus[0]
        raise UnfittingWeightsError(
            f"Error(s) in loading state_dict for {model}: {len(surplus)} of the {len(theirs)} weights in {path} are "
            f"those of this model with the prefix {_PREFIX!r}: {theirs[name]!r} is {_without_prefix(name)!r} here. "
            f"They were saved from a model that has this one as its `module`, such as a ComposerClassifier or "
            f"DistributedDataParallel. Nothing was changed. Load the file into such a model, or take the prefix off: "
            f"composer-ckpt convert OLD.pt NEW.pt --strip-prefix {_PREFIX}"
        )


def _compare(own: Mapping[str, Any], theirs: Mapping[str, tuple[str, Any]], apart: tuple[str, ...]) -> _Fit:
    """Compare weights by name, except those with a prefix in `apart`. `theirs` has the name in the checkpoint too."""
    own = {name: value for name, value in own.items() if not name.startswith(apart)}
    theirs = {name: value for name, value in theirs.items() if not name.startswith(apart)}
    return _Fit(
        # Torch before 0.4.1 did not save `num_batches_tracked`, and current torch does not require it.
        missing=[name for name in own if name not in theirs and not name.endswith("num_batches_tracked")],
        unexpected=[name_there for name, (name_there, _) in theirs.items() if name not in own],
        differing={
            name: f"{name_there} ({difference})"
            for name, (name_there, value) in theirs.items()
            if name in own and (difference := _difference(value, own[name])) is not None
        },
    )


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
        if part._load_state_dict_pre_hooks
        or not _defining_module(type(part), "_load_from_state_dict").startswith("torch.nn.")
    )


def _defining_module(kind: type, method: str) -> str:
    return next(base.__module__ for base in kind.__mro__ if method in vars(base))


def _as_loaded(name: str, saved: Mapping[str, Any], state: "State") -> str:
    """Return the name under which a weight is loaded: without DDP's prefix if the model is no longer wrapped in DDP."""
    was_ddp = any(saved.get(key) for key in ("is_model_ddp", "_is_model_ddp", "_is_model_ddp_wrapped"))
    return canonical_name(_without_prefix(name) if was_ddp and not state.is_model_ddp else name)


def _without_prefix(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")


_CONFIG = "config.json"
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_ENDS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_HUGGING_FACE_PREFIX = "model."  # put before the names of the model inside a HuggingFaceModel


def refuse_hugging_face_folder(path: str) -> None:
    """Raise if a path is the folder of a Hugging Face model instead of a sharded checkpoint."""
    names = set(os.listdir(path)) if os.path.isdir(path) else set[str]()
    if _CONFIG in names and not names.isdisjoint(_WEIGHT_FILES) and ".metadata" not in names:
        raise IncompatibleCheckpointError(
            f"{path} is the folder of a Hugging Face model, with {_CONFIG} and weights, not a training checkpoint. "
            f"{_remedy(path)}"
        )


def hint_for_file(path: str, names: Iterable[str] = (), own: Iterable[str] = ()) -> str:
    """Return advice, with a leading space, if a file seems to hold the weights of a Hugging Face model, else "".

    Args:
        path: The file.
        names: The names of its weights.
        own: The names of the weights in the model.
    """
    if not path.endswith(_ENDS):
        return ""
    folder = os.path.dirname(path)
    has_config = os.path.isfile(os.path.join(folder, _CONFIG))
    if not has_config and {_HUGGING_FACE_PREFIX + name for name in names}.isdisjoint(own):
        return ""
    return " It seems to hold a Hugging Face model. " + _remedy(folder if has_config else "HF_DIR")


def _remedy(folder: str) -> str:
    return f"Convert it with composer-ckpt convert {folder or '.'} x.pt, and load x.pt with load_weights_only=True."


T = TypeVar("T")


_DICTS = ("optimizers", "timestamp", "dataset_state")


def refuse_unfitting_state(state: "State", saved: Mapping[str, Any], path: str) -> None:
    """Refuse a training state with parts that would fail to load after the weights were already changed.

    Args:
        state: The training state, not yet changed.
        saved: The checkpoint's `state`.
        path: The checkpoint, for the message.
    """
    for name in _DICTS:
        if saved.get(name) and not isinstance(saved[name], Mapping):
            raise _misshapen(path, f"state/{name}", saved[name], "a dict")
    algorithms: Any = saved.get("algorithms") or []
    if not isinstance(algorithms, Mapping) and not _is_list(algorithms, _is_pair):
        raise _misshapen(path, "state/algorithms", algorithms, "a list of names with their states")
    _refuse_impossible_time(saved.get("timestamp") or {}, path)
    # DeepSpeed compares its own optimizer state, and algorithms that are applied first may change the parameter groups.
    if state.deepspeed_enabled or algorithms or not isinstance(state.model, nn.Module):
        return
    optimizers: Mapping[str, Any] = saved.get("optimizers") or {}
    for name, optimizer in named_optimizers(ensure_tuple(state.optimizers)):
        if optimizers.get(name) is not None and isinstance(optimizer, torch.optim.Optimizer):
            _refuse_another_optimizer(state.model, optimizer, name, optimizers[name], path)


def _refuse_impossible_time(timestamps: Mapping[str, Any], path: str) -> None:
    if "Timestamp" not in timestamps:
        return  # the loader warns about that
    timestamp = Timestamp()  # loaded for its checks only
    try:
        timestamp.load_state_dict(dict(timestamps["Timestamp"]))
        negative = {
            name: value for name, value in timestamp.state_dict().items() if isinstance(value, int) and value < 0
        }
        if negative:
            raise ValueError(f"{negative} is before the beginning")
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleCheckpointError(
            f"{path} has no valid time in training: its state/timestamp/Timestamp is invalid: {error} "
            f"Nothing was changed. Load another checkpoint, or its weights with load_weights_only=True."
        ) from error


def _refuse_another_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, saved: Any, path: str
) -> None:
    if isinstance(saved, Mapping) and "param_groups" not in saved:
        return  # an optimizer with its own layout
    where = f"state/optimizers/{name}"
    groups: Any = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not _is_list(groups, lambda group: isinstance(group, Mapping) and _is_list(group.get("params"))):
        raise _misshapen(path, f"{where}/param_groups", groups, "a list of dicts with 'params'")
    saved_names: list[Any] = [parameter for group in groups for parameter in group["params"]]
    of_parameters: Any = saved.get("state")
    if not isinstance(of_parameters, Mapping) or not _is_list(
        saved_names, lambda parameter: isinstance(of_parameters.get(parameter, {}), Mapping)
    ):
        raise _misshapen(path, f"{where}/state", of_parameters, "a dict with a dict for each parameter")
    _compare_parameters(model, optimizer, name, groups, saved_names, path)


def _compare_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, groups: Any, saved_names: list[Any], path: str
) -> None:
    # Old checkpoints number the parameters, so only the sizes of the groups can be compared.
    if any(isinstance(parameter, int) for parameter in saved_names):
        sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (optimizer.param_groups, groups))
        if sizes != saved_sizes:
            raise _of_other_parameters(path, name, f"has groups of {saved_sizes} parameters, and now of {sizes}")
    # Torch has its own rules for loading sharded parameters.
    elif not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        _compare_names(model, optimizer, name, {canonical_name(str(saved_name)) for saved_name in saved_names}, path)


def _compare_names(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, saved_names: set[str], path: str
) -> None:
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
        words = f"has no state of {missing[0]!r} ({len(missing)} such parameters in all), which is optimized now"
        raise _of_other_parameters(path, name, words)
    if unexpected:
        words = f"has the parameter {shown(unexpected[0])} ({len(unexpected)} in all), which is not optimized now"
        raise _of_other_parameters(path, name, words)


def _of_other_parameters(path: str, name: str, words: str) -> UnfittingOptimizerError:
    return UnfittingOptimizerError(
        f"{path} was saved with an optimizer of other parameters: its {name} {words}. Nothing was changed. Restore the "
        f"model and the optimizer that it was saved with, or load the weights alone with load_weights_only=True."
    )


def _misshapen(path: str, where: str, value: object, expected: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"{path} is not a training state: its {where} is {shown(value)}, and should be {expected}. Nothing was "
        f"changed. Load another checkpoint, or leave that out with load_ignore_keys=[{where!r}]."
    )


def named_optimizers(optimizers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each optimizer with its name in checkpoints: its class, and `Name#1` for the second of one class."""
    names: list[str] = []
    for optimizer in optimizers:
        count = names.count(name := type(optimizer).__qualname__)
        names.append(name)
        yield (f"{name}#{count}" if count else name), optimizer


def _is_list(value: Any, is_item: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(is_item, value))


def _is_pair(value: Any) -> bool:
    return _is_list(value) and len(value) == 2 and isinstance(value[0], str)
