"""Sharding with FSDP2."""

from composer_fsdp.sharding import apply_fully_shard, prepare_fully_shard
from composer_fsdp.summon import summon_full_params_fsdp2

__all__ = ["apply_fully_shard", "prepare_fully_shard", "summon_full_params_fsdp2"]
