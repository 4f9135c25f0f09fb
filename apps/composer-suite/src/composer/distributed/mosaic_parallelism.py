"""Sharding as Composer's users call it, and PyTorch's own values for its settings."""

from composer._lazy import lazy_face
from composer_fsdp.parse import BACKWARD_PREFETCH_MAP, SHARDING_MAP, get_mixed_precision
from composer_fsdp.sharding import prepare_fsdp_module, prepare_tp_module

__all__ = [
    "BACKWARD_PREFETCH_MAP",
    "SHARDING_MAP",
    "get_mixed_precision",
    "prepare_fsdp_module",
    "prepare_tp_module",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {},
    renamed={
        "backward_prefetch_map": f"{__name__}.BACKWARD_PREFETCH_MAP",
        "sharding_map": f"{__name__}.SHARDING_MAP",
    },
    removed={
        "get_cpu_offload": "set cpu_offload=True in the composer.utils.FSDPConfig.",
        "set_custom_fsdp_module_kwargs": "fsdp_wrap_fn(module) returns a dict of settings by their names, such as "
        "{'sharding_strategy': 'FULL_SHARD', 'process_group': 'node'}, and nothing has to be made of them before.",
    },
)
