"""Which settings there are, and what to say about a name that is none of them."""

import difflib
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

__all__ = ["by_name", "check_keys", "explain_key", "take_legacy_keys"]

_RENAMED = {
    "auto_wrap_policy": "define fsdp_wrap_fn(module) on the model, or set module._fsdp_wrap = True",
    "param_init_fn": "define param_init_fn(module) on the model",
    "device_id": "pass device= to the Trainer",
    "ignored_states": "use 'ignored_modules'",
    "ignored_parameters": "use 'ignored_modules'",
    "mesh": "use 'data_parallel_shard_degree' and 'data_parallel_replicate_degree'",
    "mp_policy": "use 'mixed_precision'",
    "offload_policy": "use 'cpu_offload'",
    "reshard_after_forward": "use 'sharding_strategy' ('FULL_SHARD' frees weights after the forward pass, "
    "'SHARD_GRAD_OP' keeps them), or an FSDP2Config, which has it",
    "fsdp_config": "use 'fsdp'",
    "fsdp_auto_wrap": "use 'auto_wrap'",
    "tensor_parallel": "use 'tp'",
    "tp_config": "use 'tp'",
}
_UNDERSTOOD_LATER = {
    "flatten_parameters": "has no effect any more: FSDP2 never flattens parameters. Leave it out",
    "min_params": "is of older releases and still works. Define fsdp_wrap_fn(module) on the model, which says the same "
    "by name instead of by size",
    "load_fsdp_monolith_rank0_only": "is now called 'load_monolith_rank0_only'",
}


def by_name(value: Any) -> Any:
    """Return the name of an enumeration's member, such as torch's `ShardingStrategy.FULL_SHARD`; else the value."""
    return value.name if isinstance(value, Enum) else value


def explain_key(key: object, known: Iterable[str]) -> str:
    """Return a sentence on an unknown key: what replaced it, or the names that are nearest."""
    known = frozenset(known)
    if key in _RENAMED and key not in known:
        return f"Instead of it, {_RENAMED[str(key)]}."
    names = sorted(known)
    near = difflib.get_close_matches(str(key), names, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(repr(name) for name in near)}?"
    return f"The keys are {', '.join(names)}."


def check_keys(where: str, keys: Iterable[object], known: Iterable[str]) -> None:
    """Refuse keys that are no settings.

    Raises:
        TypeError: With what replaced the key, or the nearest names.
    """
    known = frozenset(known)
    for key in keys:
        if key not in known:
            raise TypeError(f"{where} got an unexpected keyword argument {key!r}. {explain_key(key, known)}")


def take_legacy_keys(settings: Mapping[str, Any], *, stacklevel: int) -> dict[str, Any]:
    """Return FSDP settings under today's names, with a `DeprecationWarning` for each that is not.

    Raises:
        ValueError: If a setting is given under both names.
    """
    taken = dict(settings)
    for key, advice in _UNDERSTOOD_LATER.items():
        if key in taken:
            warnings.warn(f"fsdp_config[{key!r}] {advice}.", DeprecationWarning, stacklevel=stacklevel + 1)
    taken.pop("flatten_parameters", None)
    if "load_fsdp_monolith_rank0_only" in taken:
        older = taken.pop("load_fsdp_monolith_rank0_only")
        if taken.setdefault("load_monolith_rank0_only", older) != older:
            raise ValueError(
                f"fsdp_config has load_fsdp_monolith_rank0_only={older!r} and "
                f"load_monolith_rank0_only={taken['load_monolith_rank0_only']!r}, which mean the same. Give the latter."
            )
    return taken
