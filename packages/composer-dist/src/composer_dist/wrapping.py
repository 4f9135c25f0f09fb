"""Wrappers of distributed models: which one a model has, and the names of parameters without them."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["canonical_name", "is_model_ddp", "is_model_deepspeed", "is_model_fsdp", "is_model_fsdp2", "unwrap_model"]


# Attributes under which torch.compile, activation checkpointing and FSDP1 keep the wrapped module. DDP's "module" is
# missing, since models use that name themselves.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def is_model_ddp(model: object) -> bool:
    """Return whether the model is a `DistributedDataParallel`.

    Only the outermost wrapper counts: a wrapped model that was compiled afterwards is not one.

    Example:
        >>> import torch
        >>> is_model_ddp(torch.nn.Linear(2, 1))
        False
    """
    from torch.nn.parallel import DistributedDataParallel  # slow to import

    return isinstance(model, DistributedDataParallel)


def is_model_deepspeed(model: object) -> bool:
    """Return whether the model is a DeepSpeed engine.

    DeepSpeed is not imported for this: without it loaded, an engine cannot exist.

    Example:
        >>> import torch
        >>> is_model_deepspeed(torch.nn.Linear(2, 1))
        False
    """
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def is_model_fsdp(model: object) -> bool:
    """Return whether the model or one of its direct children is a `FullyShardedDataParallel` (FSDP version 1).

    Example:
        >>> import torch
        >>> is_model_fsdp(torch.nn.Linear(2, 1))
        False
    """
    return _is_or_has(model, "FullyShardedDataParallel")


def is_model_fsdp2(model: object) -> bool:
    """Return whether the model or one of its direct children was passed to `fully_shard` (FSDP version 2).

    Example:
        >>> import torch
        >>> is_model_fsdp2(torch.nn.Linear(2, 1))
        False
    """
    return _is_or_has(model, "FSDPModule")


def unwrap_model(model: "Module") -> "Module":
    """Return the model inside DDP, `DataParallel`, DeepSpeed's engine and `torch.compile`, in any nesting.

    `fully_shard` does not wrap, so its modules are returned as they are.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> unwrap_model(torch.compile(layer)) is layer
        True
    """
    from torch.nn.parallel import DataParallel  # slow to import, as above

    while True:  # wrappers nest in any order
        if is_model_ddp(model) or isinstance(model, DataParallel) or is_model_deepspeed(model):
            model = model.get_submodule("module")
        elif getattr(model, "_orig_mod", None) is not None:  # set by `torch.compile`
            model = model.get_submodule("_orig_mod")
        else:
            return model


def canonical_name(name: str) -> str:
    """Return the name of a parameter, buffer or module without the wrappers in its path.

    Args:
        name: The current name.

    Example:
        >>> canonical_name("blocks.0._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    parts = name.split(".")
    # Most names contain no wrapper and need no new string.
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


def _is_or_has(model: object, wrapper: str) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # slow to import; unloaded, it cannot have sharded the model
        return False
    children: Any = getattr(model, "children", tuple)  # any object may be passed, not only a module
    return any(isinstance(part, getattr(fsdp, wrapper)) for part in (model, *children()))
