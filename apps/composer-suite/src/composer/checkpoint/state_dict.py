"""What is saved of a model, an optimizer and a run, as dicts."""

from composer_checkpoint.modular.state_dict import (
    get_metadata_state_dict,
    get_model_state_dict,
    get_optim_state_dict,
    get_resumption_state_dict,
)

__all__ = ["get_metadata_state_dict", "get_model_state_dict", "get_optim_state_dict", "get_resumption_state_dict"]
