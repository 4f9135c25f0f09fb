"""When ranks share their gradients, and what lets them: copies of the model, or parts of it."""

from composer_dist import DDPSyncStrategy, ddp_sync_context, prepare_ddp_module
from composer_fsdp.sharding import prepare_fsdp_module, prepare_tp_module

__all__ = ["DDPSyncStrategy", "ddp_sync_context", "prepare_ddp_module", "prepare_fsdp_module", "prepare_tp_module"]
