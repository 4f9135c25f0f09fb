"""Which modules are sharded, and what becomes of the weights that they share."""

from composer_fsdp.optimizers import sync_optimizer_and_model_params, update_optimizer_modules
from composer_fsdp.policies import generate_composer_model_policy, generate_default_policy
from composer_fsdp.tied import (
    check_param_tying,
    get_standalone_and_tied_modules,
    legalize_param_sharing_between_modules,
)

__all__ = [
    "generate_composer_model_policy",
    "generate_default_policy",
    "check_param_tying",
    "get_standalone_and_tied_modules",
    "legalize_param_sharing_between_modules",
    "sync_optimizer_and_model_params",
    "update_optimizer_modules",
]
