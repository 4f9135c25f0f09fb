"""Distributed functions under Composer's name, `composer.utils.dist`.

`dist` in this module is `torch.distributed`. Functions look it up on every call, so tests may patch it.
"""

import torch.distributed as dist  # noqa: F401  # a public name: tests written for Composer patch torch through it

from composer_dist.agreement import busy_wait_for_local_rank_zero as busy_wait_for_local_rank_zero
from composer_dist.agreement import get_node_signal_file_name as get_node_signal_file_name
from composer_dist.agreement import local_rank_zero_download_and_wait as local_rank_zero_download_and_wait
from composer_dist.agreement import run_local_rank_zero_first as run_local_rank_zero_first
from composer_dist.agreement import write_signal_file as write_signal_file
from composer_dist.collectives import (
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
    is_available,
    is_initialized,
)
from composer_dist.collectives import all_gather_object_list_hpu as all_gather_object_list_hpu
from composer_dist.env import MissingEnvironmentError as MissingEnvironmentError
from composer_dist.env import (
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
)
from composer_dist.initialize import initialize_dist
from composer_dist.reproducibility import get_sampler

__all__ = [
    "is_available",
    "is_initialized",
    "get_world_size",
    "get_global_rank",
    "get_local_world_size",
    "get_local_rank",
    "get_node_rank",
    "barrier",
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_object",
    "initialize_dist",
    "get_sampler",
]
