"""Whole parameters in place of the shards, for a while."""

from composer_fsdp.summon import get_summon_params_fn, validate_all_dtensors_are_fsdp_based

__all__ = ["get_summon_params_fn", "validate_all_dtensors_are_fsdp_based"]
