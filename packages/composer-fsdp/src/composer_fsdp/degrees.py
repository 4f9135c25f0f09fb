"""Over how many ranks weights are replicated, sharded and split."""

import math
from collections.abc import Mapping
from typing import Any

from composer_fsdp.config import FSDP2Config, FSDPConfig, TPConfig

__all__ = ["AXES", "FILLS_UP", "check_degree", "fill_degrees"]

AXES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
"""The names of a mesh's axes, in their order."""

FILLS_UP = -1
"""The degree of an axis that takes what the others leave."""


def fill_degrees(config: FSDPConfig | FSDP2Config, tp: TPConfig | None, world_size: int) -> dict[str, int]:
    """Return how long each axis is, with the one that takes what the others leave filled in.

    Raises:
        ValueError: If the degrees do not multiply to the number of ranks, or two of them are -1.

    Example:
        >>> fill_degrees(FSDPConfig(data_parallel_replicate_degree=2), None, world_size=8)
        {'data_parallel_replicate': 2, 'data_parallel_shard': 4}
    """
    given: dict[str, Any] = {
        AXES[0]: config.data_parallel_replicate_degree,
        AXES[1]: config.data_parallel_shard_degree,
        AXES[2]: None if tp is None else tp.tensor_parallel_degree,
    }
    degrees = {
        axis: check_degree(axis, degree) for axis, degree in given.items() if degree is not None or axis == AXES[1]
    }
    open_axes = [axis for axis, degree in degrees.items() if degree == FILLS_UP]
    if len(open_axes) > 1:
        raise ValueError(
            f"Found multiple parallelism dimensions with -1: {_listed(dict.fromkeys(open_axes, FILLS_UP))}. Only one "
            f"of them can take the ranks that the others leave; give the others a degree of 1 or more."
        )
    fixed = math.prod(degree for degree in degrees.values() if degree != FILLS_UP)
    if fixed > world_size:
        problem = "is less than"
    elif open_axes:
        problem = "is not divisible by" if world_size % fixed else ""
    else:
        problem = "does not equal" if world_size != fixed else ""
    if problem:
        raise ValueError(
            f"World size {world_size} {problem} the product of the specified parallelism degrees, {fixed}, of "
            f"{_listed(degrees)}. Change the degrees or the number of processes; one degree of -1 takes all the ranks "
            f"that the others leave."
        )
    return {axis: world_size // fixed if degree == FILLS_UP else degree for axis, degree in degrees.items()}


def _listed(degrees: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}_degree={degree}" for axis, degree in degrees.items())


def check_degree(axis: str, degree: object) -> int:
    """Return a degree if it is one.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(degree, int) and not isinstance(degree, bool) and (degree >= 1 or degree == FILLS_UP):
        return degree
    raise ValueError(
        f"{axis}_degree={degree!r} is not a number of ranks: it has to be 1 or more, or -1 for all ranks that the "
        f"other degrees leave."
    )
