"""Modes, intervals, names, wrappers and ports: what has no other historical home."""

from composer._former_modules import ONLY_TORCH_2
from composer._lazy import lazy_face
from composer.utils.notebook import is_notebook
from composer_algorithms.dataset_transforms import add_vision_dataset_transform
from composer_dist.devices import STR_TO_DTYPE
from composer_dist.env import get_free_tcp_port
from composer_dist.wrapping import is_model_ddp, is_model_deepspeed, is_model_fsdp, is_model_fsdp2
from composer_events.formatting import partial_format
from composer_events.intervals import create_interval_scheduler
from composer_events.parallelism import ParallelismType
from composer_events.warnings import warning_on_one_line
from composer_models import model_eval_mode

__all__ = [
    "ParallelismType",
    "STR_TO_DTYPE",
    "add_vision_dataset_transform",
    "create_interval_scheduler",
    "get_free_tcp_port",
    "is_model_ddp",
    "is_model_deepspeed",
    "is_model_fsdp",
    "is_model_fsdp2",
    "is_notebook",
    "model_eval_mode",
    "partial_format",
    "warning_on_one_line",
]

__getattr__, __dir__ = lazy_face(
    __name__, {}, removed=dict.fromkeys(["using_torch_2", "using_torch_2_0_1"], ONLY_TORCH_2)
)
