"""How gradients are shared by ranks."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_dist import DDPSyncStrategy as DDPSyncStrategy
    from composer_dist import ddp_sync_context as ddp_sync_context
    from composer_dist import prepare_ddp_module as prepare_ddp_module

__all__ = ["DDPSyncStrategy", "ddp_sync_context", "prepare_ddp_module"]

__getattr__, __dir__ = lazy_face(__name__, {"composer_dist": __all__}, submodules=["dist_strategy"])
