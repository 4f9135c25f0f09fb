"""A model's weights by the names that they have without wrappers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from composer_events._sharding import is_sharded, is_wrapper

__all__ = ["canonical_name", "get_model_state", "set_model_state", "sharded_options", "unwrapped"]

log = logging.getLogger("composer.core.state")

# Names under which torch.compile and activation checkpointing keep the module that they wrap. Packages above take those
# of composer-dist, which is a neighbour of this one.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def unwrapped(model: Any) -> Any:
    """Take off DDP, DataParallel, DeepSpeed's engine and `torch.compile`, in whatever order they were put on.

    It is what `composer_dist.unwrap_model` does, for packages above; this one has no neighbors that it could ask.
    """
    while True:
        if is_wrapper(model):
            model = model.module
        elif "_orig_mod" in getattr(model, "_modules", ()):
            model = model._orig_mod
        else:
            return model


def canonical_name(name: str) -> str:
    """Leave the wrappers' parts out of a parameter's name."""
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


def get_model_state(model: Any, state_dict_type: str | None) -> dict[str, Any]:
    """Collect the weights by name.

    Args:
        model: Where it is not sharded, the tensors of the result are its own.
        state_dict_type: `'full'` gathers a sharded model on rank 0's host, other ranks get nothing; `'sharded'`
            gives every rank its shard on the host. Every rank must call this with both.
    """
    if is_sharded(model):
        # Sharded models only: importing this takes longer than saving a small model.
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return cast("dict[str, Any]", get_model_state_dict(model, options=sharded_options(state_dict_type)))
    weights: dict[str, Any] = unwrapped(model).state_dict()
    if all(canonical_name(name) == name for name in weights):
        return weights
    return OrderedDict((canonical_name(name), value) for name, value in weights.items())


def set_model_state(
    model: Any, weights: Mapping[str, Any], state_dict_type: str | None, *, strict: bool, broadcast: bool
) -> None:
    """Load weights by name.

    Args:
        model: Changed in place.
        weights: What `get_model_state` gave. Not changed.
        state_dict_type: As it was when saving.
        strict: Whether names that are missing or too many are an error; otherwise they are logged.
        broadcast: Whether rank 0 alone has the weights of a sharded model.

    Raises:
        RuntimeError: With the text `Error(s) in loading state_dict`, if names or shapes do not fit.
    """
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
    """Say to torch how a sharded model is saved.

    Raises:
        NotImplementedError: If the type is not `'full'` or `'sharded'`.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    if state_dict_type not in ("full", "sharded"):
        raise NotImplementedError(
            f"fsdp_state_dict_type={state_dict_type!r} is not a way to save a sharded model. Use 'full', one "
            f"checkpoint on rank 0, or 'sharded', one part on each rank."
        )
    return StateDictOptions(
        full_state_dict=state_dict_type == "full", cpu_offload=True, strict=strict, broadcast_from_rank0=broadcast
    )
