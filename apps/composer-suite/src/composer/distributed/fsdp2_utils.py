"""Which modules are sharded, and what becomes of the weights that they share."""

from composer_fsdp.choice import (
    check_param_tying,
    get_standalone_and_tied_modules,
    legalize_param_sharing_between_modules,
)
from composer_fsdp.state_dicts import sync_optimizer_and_model_params, update_optimizer_modules
from composer_fsdp.wrap_rules import generate_composer_model_policy, generate_default_policy

__all__ = [
    "generate_composer_model_policy",
    "generate_default_policy",
    "check_param_tying",
    "get_standalone_and_tied_modules",
    "legalize_param_sharing_between_modules",
    "sync_optimizer_and_model_params",
    "update_optimizer_modules",
]
