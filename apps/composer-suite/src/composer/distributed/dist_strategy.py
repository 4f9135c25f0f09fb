"""When ranks share their gradients, and the wrapper that does it."""

from composer_dist import DDPSyncStrategy, ddp_sync_context, prepare_ddp_module

__all__ = ["DDPSyncStrategy", "ddp_sync_context", "prepare_ddp_module"]
