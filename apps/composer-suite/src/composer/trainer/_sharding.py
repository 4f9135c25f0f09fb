"""Sharding of a Trainer's model: arguments, strategy and device mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from composer.trainer._arguments import user_stacklevel
from composer_dist import get_world_size

if TYPE_CHECKING:
    from composer.trainer._arguments import TrainerArguments
    from composer_dist.ddp import DDPSyncStrategy
    from composer_dist.devices import Device, Precision
    from composer_dist.strategy import Strategy
    from composer_events.algorithm import Algorithm
    from composer_events.state import State
    from composer_fsdp import FSDP, ParallelismConfig, ShardingPlan


def read_parallelism(given: TrainerArguments) -> ParallelismConfig | None:
    """Return the sharding settings from the arguments, or `None`."""
    arguments = (given.parallelism_config, given.fsdp_config)
    if all(argument is None for argument in arguments):
        return None
    from composer_fsdp.parse import parse_parallelism  # a slow import that only sharded runs need

    return parse_parallelism(
        given.parallelism_config,
        fsdp_config=given.fsdp_config,
        fsdp_auto_wrap=given.fsdp_auto_wrap,
        load_fsdp_monolith_rank0_only=given.load_fsdp_monolith_rank0_only,
        stacklevel=user_stacklevel(),
    )


def plan_sharding(config: ParallelismConfig | None, precision: Precision, *, is_auto: bool) -> ShardingPlan | None:
    """Return the sharding plan for parallelism settings, or `None` without any."""
    if config is None:
        return None
    if is_auto and config.fsdp2 is not None:
        raise ValueError(
            "Auto microbatching is not supported outside of FSDP1: device_train_microbatch_size='auto' does not go "
            "with an FSDP2Config. Give the size as a number, or an FSDPConfig."
        )
    from composer_fsdp.plan import make_plan

    return make_plan(config, precision=precision, world_size=get_world_size(), stacklevel=user_stacklevel())


def make_strategy(
    plan: ShardingPlan,
    device: Device,
    algorithms: Iterable[Algorithm],
    sync_strategy: str | DDPSyncStrategy | None,
    comm_hook: str | None,
) -> Strategy:
    """Return the strategy for a sharding plan, unless an algorithm or an argument is incompatible with it."""
    if sync_strategy is not None or comm_hook is not None:
        raise ValueError(
            f"ddp_sync_strategy={sync_strategy!r} and ddp_comm_hook={comm_hook!r} do not go with parallelism_config: "
            "FSDP reduces the gradients itself. Leave out what you do not need."
        )
    for algorithm in algorithms:
        if algorithm.backwards_create_graph:
            raise ValueError(
                f"{type(algorithm).__name__} differentiates through the gradients (backwards_create_graph=True), which "
                "FSDP cannot. Leave out parallelism_config or the algorithm."
            )
    from composer_fsdp.strategy import FSDP  # here, because it imports torch's sharding

    return FSDP(device, plan)


def as_fsdp(strategy: Strategy) -> FSDP | None:
    """Return a strategy that shards the model, and `None` for any other, without importing the class."""
    return cast("FSDP", strategy) if hasattr(strategy, "plan") else None


def facts_of(strategy: Strategy) -> dict[str, Any] | None:
    """Return the sharding settings that must agree on all ranks."""
    fsdp = as_fsdp(strategy)
    return None if fsdp is None else fsdp.plan.facts()


def share_mesh(strategy: Strategy, state: State) -> None:
    """Make the strategy and the state use the same device mesh."""
    fsdp = as_fsdp(strategy)
    if fsdp is None:
        return
    fsdp.seed = state.rank_zero_seed
    if state.device_mesh is not None:
        fsdp.mesh = state.device_mesh
    if fsdp.is_prepared:
        state.device_mesh = fsdp.mesh
        meshes = fsdp.sharded.meshes
        state.fsdp_config.device_mesh = meshes.data
        if state.tp_config is not None:
            state.tp_config.device_mesh = meshes.tensor
