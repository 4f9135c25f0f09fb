"""Whether saved weights fit a model, found out before any weight is changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer_checkpoint._hugging_face_hints import hint_for_file
from composer_checkpoint.errors import IncompatibleCheckpointError, UnfittingWeightsError, shown
from composer_checkpoint.modular._names import names_in_model
from composer_dist.strategy import canonical_name, unwrap_model

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["refuse_another_model"]

log = getLogger(__name__)

_MAX_NAMES = 10
_PREFIX = "module."  # what DistributedDataParallel puts before names, and a ComposerModel that has its network there


def refuse_another_model(state: "State", saved: dict[str, Any], path: str, *, strict: bool, leaves_out: bool) -> None:
    """Refuse weights that do not fit the model, unless algorithms will change the model.

    Messages have the names of the checkpoint, by which they can be ignored.

    What modules load in their own way is left to them.

    Args:
        state: Has the model.
        saved: The checkpoint's `state`. Weights that are left out are removed from it.
        path: The checkpoint, for the message.
        strict: Whether names that are missing or too many are an error.
        leaves_out: Whether weights of another shape are left out, rather than an error.

    Raises:
        IncompatibleCheckpointError: If there are no names with weights.
        UnfittingWeightsError: If not one weight is the model's, or not all fit.
    """
    weights = saved.get("model")
    if state.deepspeed_enabled:
        return  # its engine compares them
    if weights and not isinstance(weights, dict):
        raise IncompatibleCheckpointError(
            f"{path} is no training state: its state/model is {shown(weights)}, and should be a dict of weights. Load "
            f"another checkpoint."
        )
    if not weights or saved.get("algorithms") or not isinstance(state.model, nn.Module):
        return
    values = unwrap_model(state.model).state_dict()
    own = {name: values[name_here] for name, name_here in names_in_model(state.model).items()}
    theirs = {_as_loaded(str(name), saved, state): name for name in weights}
    apart = _loading_in_their_own_way(state.model)
    if "" not in apart:
        _refuse_another_prefix(own, theirs, path, type(unwrap_model(state.model)).__name__)
    if own and {*map(_without_prefix, own)}.isdisjoint(map(_without_prefix, theirs)):
        raise UnfittingWeightsError(
            f"Error(s) in loading state_dict for {type(unwrap_model(state.model)).__name__}: {path} is of another "
            f"model: not one of its {len(theirs)} weights ({', '.join(sorted(map(str, weights))[:5])}, ...) is among "
            f"the {len(own)} of this model ({', '.join(sorted(own)[:5])}, ...). Load it into the model that it was "
            f"saved from.{hint_for_file(path, theirs, own)}"
        )
    fit = _compare(
        {name: value for name, value in own.items() if not name.startswith(apart)},
        {plain: (str(name), weights[name]) for plain, name in theirs.items() if not plain.startswith(apart)},
    )
    if fit.differing and leaves_out:
        log.warning(
            "%d weights of %s have another shape in the model and are left out: %s",
            len(fit.differing),
            path,
            _listed(fit.differing.values()),
        )
        left_out = {theirs[name] for name in fit.differing}
        saved["model"] = {name: value for name, value in weights.items() if name not in left_out}
    elif fit.differing or (strict and (fit.missing or fit.unexpected)):
        raise UnfittingWeightsError(fit.told(path, type(unwrap_model(state.model)).__name__))


@dataclass(frozen=True, slots=True)
class _Fit:
    """What does not fit: names that only the model has, those that only the checkpoint has, and what differs."""

    missing: list[str]
    unexpected: list[str]
    differing: Mapping[str, str]

    def told(self, path: str, model: str) -> str:
        lists = (
            ("not in the checkpoint", self.missing),
            ("not in the model", self.unexpected),
            ("of another shape or kind", self.differing.values()),
        )
        told = "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in lists if names)
        return (
            f"Error(s) in loading state_dict for {model}: {path} is of another model. Weights {told}. Nothing was "
            f"changed. Load it into the model that it was saved from, or load what fits with load_weights_only=True "
            f"and load_strict_model_weights=False."
        )


def _refuse_another_prefix(own: Iterable[str], theirs: Mapping[str, Any], path: str, model: str) -> None:
    """Refuse names of which none is the model's, and would be with the prefix `module.`, or without it."""
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


def _compare(own: Mapping[str, Any], theirs: Mapping[str, tuple[str, Any]]) -> _Fit:
    """Compare weights by name; those of the checkpoint have the name there beside them, for the message."""
    return _Fit(
        # Torch before 0.4.1 did not count a batch norm's batches, and torch of today does not ask for it.
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
        return None
    if not isinstance(theirs, torch.Tensor):
        return f"{type(theirs).__name__} in the checkpoint, a tensor in the model"
    shape = () if own.dim() == 0 and theirs.shape == (1,) else tuple(theirs.shape)  # as torch before 0.4 had scalars
    if shape != tuple(own.shape):
        return f"{tuple(theirs.shape)} in the checkpoint, {tuple(own.shape)} in the model"
    if _kind(theirs.dtype) != _kind(own.dtype):  # between floating point types, weights are converted
        return f"{theirs.dtype} in the checkpoint, {own.dtype} in the model"
    return None


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "whole"


def _loading_in_their_own_way(model: nn.Module) -> tuple[str, ...]:
    """Return what the names in modules begin with that rename or convert what they are given.

    Only loading shows whether that fits.
    """
    model = unwrap_model(model)
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return ("",)
    return tuple(
        canonical_name(f"{name}.") if name else ""
        for name, part in model.named_modules()
        # Torch has no public way to ask for the hooks, which `register_load_state_dict_pre_hook` adds to.
        if part._load_state_dict_pre_hooks
        or not _defining_module(type(part), "_load_from_state_dict").startswith("torch.nn.")
    )


def _defining_module(kind: type, method: str) -> str:
    return next(base.__module__ for base in kind.__mro__ if method in vars(base))


def _as_loaded(name: str, saved: Mapping[str, Any], state: "State") -> str:
    """Return the name under which a weight is loaded: what DDP put before it goes where there is no DDP any more."""
    was_ddp = any(saved.get(key) for key in ("is_model_ddp", "_is_model_ddp", "_is_model_ddp_wrapped"))
    return canonical_name(_without_prefix(name) if was_ddp and not state.is_model_ddp else name)


def _without_prefix(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
