"""How a model is spread over ranks."""

from typing import TYPE_CHECKING

from composer._former_modules import GONE
from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_dist import DDPSyncStrategy as DDPSyncStrategy
    from composer_dist import ddp_sync_context as ddp_sync_context
    from composer_dist import prepare_ddp_module as prepare_ddp_module
    from composer_fsdp.sharding import parallelize_composer_model as parallelize_composer_model
    from composer_fsdp.sharding import parallelize_model as parallelize_model
    from composer_fsdp.sharding import prepare_fsdp_module as prepare_fsdp_module
    from composer_fsdp.sharding import prepare_tp_module as prepare_tp_module
    from composer_fsdp.summon import get_summon_params_fn as get_summon_params_fn

__all__ = [
    "DDPSyncStrategy",
    "ddp_sync_context",
    "prepare_ddp_module",
    "parallelize_composer_model",
    "parallelize_model",
    "prepare_fsdp_module",
    "prepare_tp_module",
    "get_summon_params_fn",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_dist": ["DDPSyncStrategy", "ddp_sync_context", "prepare_ddp_module"],
        "composer_fsdp.sharding": [
            "parallelize_composer_model",
            "parallelize_model",
            "prepare_fsdp_module",
            "prepare_tp_module",
        ],
        "composer_fsdp.summon": ["get_summon_params_fn"],
    },
    submodules=[
        "activation_checkpointing",
        "dist_strategy",
        "fsdp2",
        "fsdp2_utils",
        "meta_safe_apply",
        "mosaic_parallelism",
        "param_init",
        "prepare_distributed",
        "shared_utils",
    ],
    removed=dict.fromkeys(
        ["fix_batch_precision_for_deepspeed", "parse_deepspeed_config"], GONE["composer.distributed.deepspeed"]
    ),
)
