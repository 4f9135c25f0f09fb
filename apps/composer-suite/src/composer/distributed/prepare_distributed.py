"""Sharding a module with one call."""

from composer_fsdp.sharding import parallelize_composer_model, parallelize_model

__all__ = ["parallelize_composer_model", "parallelize_model"]
