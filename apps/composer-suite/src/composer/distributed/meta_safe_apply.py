"""A function on the tensors of a module that is on the meta device."""

from composer_fsdp.meta_init import meta_safe_apply

__all__ = ["meta_safe_apply"]
