"""Refuse settings of parallelism that contradict each other, before anything is sharded by them."""

from __future__ import annotations

import warnings
from typing import Any, Final

from composer_events._ranks import any_rank, get_global_rank

__all__ = ["check_fsdp_settings", "check_loading_on_rank_zero", "usable_tp_config"]

# 'local' is the legacy type, which the layer of checkpoints still reads.
_STATE_DICT_TYPES: Final = (None, "full", "sharded", "local")


def check_fsdp_settings(fsdp_config: Any, save_metrics: bool) -> None:
    """Refuse settings that cannot be meant.

    Raises:
        ValueError: If the checkpoint's type is none, or metrics or offloading do not go with the rest.
    """
    kind: object = getattr(fsdp_config, "state_dict_type", None)
    if kind not in _STATE_DICT_TYPES:
        raise ValueError(
            f"state_dict_type={kind!r} is not a way to save a sharded model: fsdp_state_dict_type must be one of "
            f"'full', one checkpoint on rank 0, 'sharded', one part on each rank, and None, which means 'full'."
        )
    if kind == "sharded" and save_metrics:
        raise ValueError(
            "save_metrics=True does not go with state_dict_type='sharded', since metrics are not sharded. Use "
            "save_metrics=False, or state_dict_type='full'."
        )
    if getattr(fsdp_config, "activation_cpu_offload", False) and not _uses_original_parameters(fsdp_config):
        raise ValueError(
            "activation_cpu_offload=True is not supported with use_orig_params=False. Use use_orig_params=True, which "
            "is the default, or leave the activations where they are."
        )


def usable_tp_config(tp_config: Any, fsdp_config: Any) -> Any:
    """Give the settings of tensor parallelism back, or `None` where they split nothing.

    Raises:
        ValueError: If there are no FSDP settings that tensor parallelism works with.
    """
    if tp_config is None:
        return None
    _warn("Tensor parallelism (TP) is experimental and may change in future versions.", FutureWarning)
    if fsdp_config is None:
        raise ValueError(
            f"Tensor parallelism (TP) currently requires FSDP to be enabled. The parallelism configuration has "
            f"tp={tp_config!r} and no FSDP settings. Give FSDP settings too, or leave tp out."
        )
    if not _uses_original_parameters(fsdp_config):
        raise ValueError(
            "use_orig_params=False does not go with tensor parallelism (TP), which splits the parameters themselves. "
            "Use use_orig_params=True, which is the default, or leave tp out."
        )
    if getattr(tp_config, "tensor_parallel_degree", 1) != 1:
        return tp_config
    _warn(
        "Received tensor_parallel_degree of 1, which is a no-op. Tensor parallelism will not be used. Give 2 or more, "
        "or leave tp out.",
        UserWarning,
    )
    return None


def check_loading_on_rank_zero(model: Any, fsdp_config: Any, version: int, tp_config: Any) -> None:
    """Refuse to load on rank 0 alone what the other ranks could not get from there. Every rank must call this.

    Raises:
        ValueError: With tensor parallelism; with FSDP 1 also if the ranks do not receive rank 0's weights when the
            model is sharded, or if rank 0 has no weights of its own. On every rank, whichever of them has the fault.
    """
    if tp_config is not None:
        raise ValueError(
            "load_monolith_rank0_only is not compatible with tensor parallelism (TP), where no rank holds whole "
            "parameters to pass on. Leave one of the two out."
        )
    if version != 1:
        return
    if not getattr(fsdp_config, "sync_module_states", False):
        raise ValueError(
            "load_monolith_rank0_only=True needs sync_module_states=True: only rank 0 reads the checkpoint, and the "
            "other ranks have to receive its weights when the model is sharded. Set both, on every rank."
        )
    if any_rank(get_global_rank() == 0 and _has_meta_parameters(model)):
        raise ValueError(
            "load_monolith_rank0_only=True needs real weights on rank 0, where the checkpoint is loaded, and the model "
            "has parameters on the meta device there. Build it on the CPU on rank 0, and on meta on the others only."
        )


def _warn(message: str, category: type[Warning]) -> None:
    # Past this function, its caller, the mixin and the constructor of State.
    warnings.warn(message, category, stacklevel=5)


def _uses_original_parameters(fsdp_config: Any) -> bool:
    return bool(getattr(fsdp_config, "use_orig_params", True))


def _has_meta_parameters(model: Any) -> bool:
    return hasattr(model, "parameters") and any(parameter.is_meta for parameter in model.parameters())
