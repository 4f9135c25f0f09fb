"""What is wrapped around a model so that it trains on several ranks."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["canonical_name", "is_model_ddp", "is_model_deepspeed", "is_model_fsdp", "is_model_fsdp2", "unwrap_model"]

# Under which torch.compile, activation checkpointing and FSDP1 keep the module that they wrap. DDP's "module" is not
# here, since models have attributes of that name themselves.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def is_model_ddp(model: object) -> bool:
    """Answer whether the model is a `DistributedDataParallel`.

    Only the outermost wrapper counts: a model that was compiled after it was wrapped is not one.

    Example:
        >>> import torch
        >>> is_model_ddp(torch.nn.Linear(2, 1))
        False
    """
    from torch.nn.parallel import DistributedDataParallel  # slow: torch, which the rest of the module does not need

    return isinstance(model, DistributedDataParallel)


def is_model_deepspeed(model: object) -> bool:
    """Answer whether the model is DeepSpeed's engine.

    DeepSpeed is not imported for it: who has not loaded it has no engine.

    Example:
        >>> import torch
        >>> is_model_deepspeed(torch.nn.Linear(2, 1))
        False
    """
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def is_model_fsdp(model: object) -> bool:
    """Answer whether the model, or one of its direct children, is a `FullyShardedDataParallel` (FSDP version 1).

    Example:
        >>> import torch
        >>> is_model_fsdp(torch.nn.Linear(2, 1))
        False
    """
    return _is_or_has(model, "FullyShardedDataParallel")


def is_model_fsdp2(model: object) -> bool:
    """Answer whether the model, or one of its direct children, was given to `fully_shard` (FSDP version 2).

    Example:
        >>> import torch
        >>> is_model_fsdp2(torch.nn.Linear(2, 1))
        False
    """
    return _is_or_has(model, "FSDPModule")


def unwrap_model(model: "Module") -> "Module":
    """Return the model inside DDP, `DataParallel`, DeepSpeed's engine and `torch.compile`, in whatever order.

    What `fully_shard` shards is no wrapper, and stays the model that it is.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> unwrap_model(torch.compile(layer)) is layer
        True
    """
    from torch.nn.parallel import DataParallel  # as above

    while True:
        if is_model_ddp(model) or isinstance(model, DataParallel) or is_model_deepspeed(model):
            model = model.get_submodule("module")
        elif getattr(model, "_orig_mod", None) is not None:  # where `torch.compile` keeps it
            model = model.get_submodule("_orig_mod")
        else:
            return model


def canonical_name(name: str) -> str:
    """Return the name that a parameter, buffer or module has in a model without wrappers inside it.

    Args:
        name: Its name now.

    Example:
        >>> canonical_name("blocks.0._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


def _is_or_has(model: object, wrapper: str) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # slow to import, and who has not done so has sharded nothing
        return False
    children: Any = getattr(model, "children", tuple)
    return any(isinstance(part, getattr(fsdp, wrapper)) for part in (model, *children()))
