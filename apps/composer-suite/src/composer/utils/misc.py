"""Modes, intervals, names, wrappers and ports: what has no other historical home."""

from composer_dist.ports import get_free_tcp_port
from composer_dist.precision import STR_TO_DTYPE
from composer_dist.wrapping import is_model_ddp
from composer_events.formatting import partial_format
from composer_events.intervals import create_interval_scheduler
from composer_models import model_eval_mode

__all__ = [
    "STR_TO_DTYPE",
    "create_interval_scheduler",
    "get_free_tcp_port",
    "is_model_ddp",
    "model_eval_mode",
    "partial_format",
]
