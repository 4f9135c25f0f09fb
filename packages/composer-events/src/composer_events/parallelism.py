"""Over how many ranks a model is replicated, sharded and split, as a device mesh."""

from __future__ import annotations

import math
import sys
from typing import Any

from composer_events._ranks import get_world_size
from composer_time import StringEnum

__all__ = ["ParallelismType", "make_device_mesh", "parallelism_degrees"]

_FILLS_UP = -1  # the degree that takes what the others leave of the ranks

# Strategies that say nothing of groups of ranks; the others choose theirs by where the ranks run.
_PLAIN_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")


class ParallelismType(StringEnum):
    """The names of the axes of `State.device_mesh`, in their order."""

    DATA_PARALLEL_REPLICATE = "data_parallel_replicate"
    DATA_PARALLEL_SHARD = "data_parallel_shard"
    TENSOR_PARALLEL = "tensor_parallel"


def parallelism_degrees(fsdp_config: Any, tp_config: Any, world_size: int) -> dict[str, int]:
    """Answer how long each axis of the device mesh is, by its name.

    Args:
        fsdp_config: With `data_parallel_shard_degree` and `data_parallel_replicate_degree`, which has an axis unless
            it is `None`. What it lacks has its default: all ranks share the shards.
        tp_config: With `tensor_parallel_degree`, or `None` for no such axis.
        world_size: How many ranks there are.

    Raises:
        ValueError: If the degrees do not multiply to the number of ranks, where one of them may be -1 for the rest.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(data_parallel_shard_degree=-1, data_parallel_replicate_degree=2)
        >>> parallelism_degrees(config, None, world_size=8)
        {'data_parallel_replicate': 2, 'data_parallel_shard': 4}
    """
    given: dict[ParallelismType, object] = {
        ParallelismType.DATA_PARALLEL_REPLICATE: getattr(fsdp_config, "data_parallel_replicate_degree", None),
        ParallelismType.DATA_PARALLEL_SHARD: getattr(fsdp_config, "data_parallel_shard_degree", _FILLS_UP),
        ParallelismType.TENSOR_PARALLEL: None if tp_config is None else _tensor_parallel_degree(tp_config),
    }
    degrees = {
        axis.value: _checked(f"{axis.value}_degree", degree) for axis, degree in given.items() if degree is not None
    }
    open_axes = [axis for axis, degree in degrees.items() if degree == _FILLS_UP]
    if len(open_axes) > 1:
        raise ValueError(
            f"Found multiple parallelism dimensions with -1: {', '.join(open_axes)}. Only one of them can take the "
            f"ranks that the others leave; give the others a degree of 1 or more."
        )
    fixed = math.prod(degree for degree in degrees.values() if degree != _FILLS_UP)
    fits = world_size % fixed == 0 if open_axes else world_size == fixed
    if not fits:
        relation = "is not divisible by" if open_axes else "does not equal"
        raise ValueError(
            f"World size {world_size} {relation} the product of the specified parallelism degrees, {fixed}, of "
            f"{degrees}. Change the degrees or the number of processes; one degree of -1 takes all the ranks that the "
            f"others leave."
        )
    return {axis: world_size // fixed if degree == _FILLS_UP else degree for axis, degree in degrees.items()}


def make_device_mesh(fsdp_config: Any, tp_config: Any, device: Any) -> Any:
    """Make the mesh that the settings ask for, with the names of `ParallelismType`. Every rank must call this.

    Args:
        fsdp_config: See `parallelism_degrees`. A `device_mesh` that it has is taken as it is. Where a `process_group`
            or a strategy says which ranks belong together instead of degrees, there is no mesh.
        tp_config: See there.
        device: Where the model will be: a device object, its name, or `None` for the CPU.

    Returns:
        A `torch.distributed.device_mesh.DeviceMesh`, or `None` without settings or while no process group runs.

    Raises:
        ValueError: As `parallelism_degrees`, and if tensor parallelism is to join a mesh that was made without it.
    """
    if fsdp_config is None:
        return None
    ready_made: Any = getattr(fsdp_config, "device_mesh", None)
    if ready_made is not None:
        _check_ready_made(ready_made, tp_config)
        return ready_made
    if tp_config is None and _is_left_to_groups(fsdp_config):
        return None
    degrees = parallelism_degrees(fsdp_config, tp_config, get_world_size())
    distributed: Any = sys.modules.get("torch.distributed")  # who has not imported it has not started it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.init_device_mesh(_device_type(device), tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def _checked(name: str, degree: object) -> int:
    if isinstance(degree, int) and not isinstance(degree, bool) and (degree >= 1 or degree == _FILLS_UP):
        return degree
    raise ValueError(
        f"{name}={degree!r} is not a number of ranks: it has to be 1 or more, or -1 for all ranks that the other "
        f"degrees leave."
    )


def _tensor_parallel_degree(tp_config: Any) -> object:
    return getattr(tp_config, "tensor_parallel_degree", 1)


def _is_left_to_groups(fsdp_config: Any) -> bool:
    if getattr(fsdp_config, "data_parallel_shard_degree", _FILLS_UP) != _FILLS_UP:
        return False
    if getattr(fsdp_config, "data_parallel_replicate_degree", None) is not None:
        return False
    strategy = str(getattr(fsdp_config, "sharding_strategy", _PLAIN_STRATEGIES[0])).upper()
    return getattr(fsdp_config, "process_group", None) is not None or strategy not in _PLAIN_STRATEGIES


def _check_ready_made(mesh: Any, tp_config: Any) -> None:
    if tp_config is not None and getattr(tp_config, "device_mesh", None) is None:
        raise ValueError(
            f"The FSDP settings have device_mesh={mesh!r} and those of tensor parallelism have none, so that nobody "
            f"knows which ranks hold one tensor together. Give both a slice of one mesh, or give degrees and no mesh."
        )


def _device_type(device: Any) -> str:
    import torch  # a process group runs, so it has been imported

    if hasattr(device, "tensor_to_device"):
        return device.tensor_to_device(torch.empty(0)).device.type
    return "cpu" if device is None else torch.device(device).type
