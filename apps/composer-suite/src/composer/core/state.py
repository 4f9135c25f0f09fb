"""Everything that a training run holds."""

from composer._lazy import lazy_face
from composer_events.state import State

__all__ = ["State"]

_MODEL = "composer.checkpoint.get_model_state_dict(model, sharded_state_dict=...) returns whole or sharded weights."
_OPTIMIZER = "composer.checkpoint.get_optim_state_dict(model, optimizer, sharded_state_dict=...) returns either kind."

__getattr__, __dir__ = lazy_face(
    __name__,
    {},
    removed={
        "fsdp_get_optim_state_dict": _OPTIMIZER,
        "fsdp_state_dict_type_context": _MODEL,
        "get_fsdp_full_optim_state_dict": _OPTIMIZER,
        "get_fsdp_sharded_optim_state_dict": _OPTIMIZER,
    },
)
