"""Everything that a training run holds, and state dicts of what is sharded."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face
from composer_events.state import State

if TYPE_CHECKING:
    from composer_checkpoint.modular.state_dict_types import fsdp_get_optim_state_dict as fsdp_get_optim_state_dict
    from composer_checkpoint.modular.state_dict_types import (
        fsdp_state_dict_type_context as fsdp_state_dict_type_context,
    )
    from composer_checkpoint.modular.state_dict_types import (
        get_fsdp_full_optim_state_dict as get_fsdp_full_optim_state_dict,
    )
    from composer_checkpoint.modular.state_dict_types import (
        get_fsdp_sharded_optim_state_dict as get_fsdp_sharded_optim_state_dict,
    )

__all__ = [
    "State",
    "fsdp_get_optim_state_dict",
    "fsdp_state_dict_type_context",
    "get_fsdp_full_optim_state_dict",
    "get_fsdp_sharded_optim_state_dict",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_checkpoint.modular.state_dict_types": [
            "fsdp_get_optim_state_dict",
            "fsdp_state_dict_type_context",
            "get_fsdp_full_optim_state_dict",
            "get_fsdp_sharded_optim_state_dict",
        ]
    },
)
