"""Loading weights into a model, whatever it is spread over."""

from collections.abc import Iterable, Mapping
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.modular._dcp import load_folder, read_entries
from composer_checkpoint.modular._names import is_sharded, names_in_model, weights_of
from composer_checkpoint.modular._sources import Source, read_on_rank_zero
from composer_checkpoint.modular._spreading import Slot, TensorSender
from composer_checkpoint.modular._values import as_dtype, cast_state
from composer_checkpoint.modular.options import CheckpointLoadOptions
from composer_checkpoint.modular.state_dict import select_keys
from composer_checkpoint.sharded._ranks import Ranks
from composer_dist.strategy import unwrap_model

__all__ = ["WeightsMismatchError", "load_weights"]

log = getLogger(__name__)

_MAX_LISTED = 10


class WeightsMismatchError(IncompatibleCheckpointError, RuntimeError):
    """The weights are those of another model."""


def load_weights(model: nn.Module, source: Source, options: CheckpointLoadOptions, *, trusted: bool) -> None:
    """Load weights from a file, which rank 0 reads, or from a folder. Every rank must call this.

    Nothing is changed on any rank unless all that is needed was found, whole and fitting.
    """
    if source.is_sharded:
        _load_folder(model, source, options)
        return
    prepare = partial(_prepared, source=source, options=options)
    with read_on_rank_zero(source.path, prepare, trusted=trusted) as own:
        if Ranks().world_size == 1 and not is_sharded(model):
            _load_plain(model, own, options.strict)
        else:
            _receive(model, TensorSender(own), options.strict)


def _prepared(content: Any, source: Source, options: CheckpointLoadOptions) -> dict[str, Any]:
    """Return the weights that are wanted, converted."""
    state = content.get("state") if isinstance(content, Mapping) else None
    weights = state["model"] if isinstance(state, Mapping) and "model" in state else content
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise IncompatibleCheckpointError(
            f"{source.path} holds a {type(weights).__name__}, and no weights by name. Name the file of a model, such "
            f"as model/model.pt, or of a whole training state."
        )
    wanted = select_keys(weights, options.include_keys, options.ignore_keys)
    return cast_state(wanted, as_dtype(options.precision))


def _load_plain(model: nn.Module, weights: Mapping[str, Any], strict: bool) -> None:
    _compare(model, weights_of(model), weights, strict)  # torch would raise when it has copied what fits
    own_names = names_in_model(model)
    unwrap_model(model).load_state_dict({own_names.get(name, name): w for name, w in weights.items()}, strict=False)


def _receive(model: nn.Module, sender: TensorSender, strict: bool) -> None:
    """Take each weight from rank 0, straight to where it belongs."""
    targets = weights_of(model)
    _compare(model, targets, sender.outline, strict)
    extra: dict[str, Any] = {}
    for name, value in sender.outline.items():
        if name not in targets:
            continue
        if isinstance(value, Slot):
            sender.receive(value, targets[name])
        else:
            extra[name] = value
    _load_extra(model, extra)


def _load_folder(model: nn.Module, source: Source, options: CheckpointLoadOptions) -> None:
    entries = read_entries(source)
    prefix = next(((*root,) for root in (("state", "model"), ()) if any(_below(path, root) for path in entries)), ())
    saved = {path[-1]: entry for path, entry in entries.items() if _below(path, prefix)}
    targets = select_keys(weights_of(model), options.include_keys, options.ignore_keys)
    precision = as_dtype(options.precision)
    readable = {
        name: _readable(target, saved.get(name), precision, options.cpu_offload) for name, target in targets.items()
    }
    nested: dict[str, Any] = readable
    for key in reversed(prefix):
        nested = {key: nested}
    load_folder(nested, source, strict=options.strict, planner=options.load_planner)
    for name, target in targets.items():
        if isinstance(target, torch.Tensor) and readable[name] is not target:
            target.copy_(readable[name].to(precision))
    _load_extra(model, {name: readable[name] for name in targets if not isinstance(targets[name], torch.Tensor)})


def _below(path: tuple[str | int, ...], prefix: tuple[str, ...]) -> bool:
    return path[:-1] == prefix


def _readable(target: Any, entry: object, precision: torch.dtype, cpu_offload: bool) -> Any:
    """Return what a saved weight can be read into: the weight itself, unless its values must be converted."""
    if not isinstance(target, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
        return target
    saved = entry.properties.dtype
    if saved == target.dtype and (not saved.is_floating_point or torch.promote_types(saved, precision) == precision):
        return target
    on_host = cpu_offload and type(target) is torch.Tensor  # the shards of others stay where their mesh is
    return torch.empty_like(target, dtype=saved, device="cpu" if on_host else None)


def _load_extra(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Give modules back what they save besides tensors."""
    if extra:
        own_names = names_in_model(model)
        unwrap_model(model).load_state_dict({own_names[name]: value for name, value in extra.items()}, strict=False)


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
        told = "; ".join(f"{len(names)} {how}: {_listed(names)}" for how, names in lists if names)
        raise WeightsMismatchError(
            f"Error(s) in loading state_dict for {type(unwrap_model(model)).__name__}: {told}. Build the model as it "
            f"was saved, or pass strict=False where names may differ."
        )
    for names, what in (
        (missing, "weights of the model are not in the checkpoint and stay as they are"),
        (unexpected, "weights of the checkpoint are not in the model and are passed over"),
    ):
        if names:
            log.warning("%d %s: %s", len(names), what, _listed(names))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:_MAX_LISTED])


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Slot | torch.Tensor) else None
