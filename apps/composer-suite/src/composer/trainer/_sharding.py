"""How a Trainer's model is sharded: from its arguments to a strategy, and what the state learns of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from composer.trainer._arguments import level_of_user
from composer_dist import get_global_rank, get_world_size

if TYPE_CHECKING:
    from composer.trainer._build import Given
    from composer_dist.ddp import DDPSyncStrategy
    from composer_dist.devices import Device, Precision
    from composer_dist.strategy import Strategy
    from composer_events.algorithm import Algorithm
    from composer_events.state import State
    from composer_fsdp import FSDP, ParallelismConfig, ShardingPlan
    from composer_fsdp.gradients import ReductionWatch

__all__ = [
    "batch_rank",
    "facts_of",
    "make_strategy",
    "needs_group",
    "plan_sharding",
    "read_parallelism",
    "refuse_late_surgery",
    "check_repeatable",
    "share_mesh",
    "watch_reductions",
]


def read_parallelism(given: Given) -> ParallelismConfig | None:
    """Return how the model shall be sharded, whatever arguments say so, or `None`.

    Raises:
        ValueError, TypeError: If they contradict each other, or say what there is not.
    """
    arguments = (given.parallelism_config, given.fsdp_config)
    if all(argument is None for argument in arguments):
        return None
    from composer_fsdp.parse import parse_parallelism  # few shard

    return parse_parallelism(
        given.parallelism_config,
        fsdp_config=given.fsdp_config,
        fsdp_auto_wrap=given.fsdp_auto_wrap,
        load_fsdp_monolith_rank0_only=given.load_fsdp_monolith_rank0_only,
        stacklevel=level_of_user(),
    )


def plan_sharding(config: ParallelismConfig | None, precision: Precision, *, is_auto: bool) -> ShardingPlan | None:
    """Return the plan that settings of parallelism make, or `None` without any.

    Args:
        config: The settings.
        precision: In which the run computes.
        is_auto: Whether the size of a microbatch is found out.

    Raises:
        ValueError: If the settings contradict each other.
    """
    if config is None:
        return None
    if is_auto and config.fsdp2 is not None:
        raise ValueError(
            "Auto microbatching is not supported outside of FSDP1: device_train_microbatch_size='auto' does not go "
            "with an FSDP2Config. Give the size as a number, or an FSDPConfig."
        )
    from composer_fsdp.plan import make_plan

    return make_plan(config, precision=precision, world_size=get_world_size(), stacklevel=level_of_user())


def make_strategy(
    plan: ShardingPlan,
    device: Device,
    algorithms: Iterable[Algorithm],
    sync_strategy: str | DDPSyncStrategy | None,
    comm_hook: str | None,
) -> Strategy:
    """Return the strategy that shards by a plan.

    Raises:
        ValueError: If an algorithm, or an argument that is about other strategies, does not go with it.
    """
    _refuse_with_sharding(algorithms, sync_strategy, comm_hook)
    from composer_fsdp.strategy import FSDP  # few shard, and it takes torch's sharding along

    return FSDP(device, plan)


def _refuse_with_sharding(
    algorithms: Iterable[Algorithm], sync_strategy: str | DDPSyncStrategy | None, comm_hook: str | None
) -> None:
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


def facts_of(strategy: Strategy) -> dict[str, Any] | None:
    """Return what the ranks must have alike of how the model is sharded."""
    plan: ShardingPlan | None = getattr(strategy, "plan", None)
    if plan is None:
        return None
    facts = plan.to_dict()
    # Ranks may belong to different parts of one mesh, and give different lists of ranks, which are compared later.
    if plan.device_mesh is not None:
        facts["device_mesh"] = (plan.device_mesh.mesh_dim_names, tuple(plan.device_mesh.shape))
    if not isinstance(plan.process_group, str | None):
        facts["process_group"] = type(plan.process_group).__name__
    return facts


def batch_rank(strategy: Strategy) -> int:
    """Return which part of a step's batch this rank reads, where ranks that hold one tensor together read the same."""
    return cast("FSDP", strategy).batch_rank if hasattr(strategy, "plan") else get_global_rank()


def needs_group(strategy: Strategy) -> bool:
    """Say whether a process that is alone needs a process group, too."""
    return strategy.prepares_before_load


def refuse_late_surgery(strategy: Strategy) -> None:
    """Refuse a model that was given other layers once it was sharded.

    Raises:
        ValueError: With the names of their weights.
    """
    if hasattr(strategy, "plan"):
        cast("FSDP", strategy).sharded.check_unchanged()


def watch_reductions(strategy: Strategy) -> ReductionWatch | None:
    """Return what knows alike on every rank, without a message, whether sharded gradients are finite, if anything does.

    Every rank must call this.
    """
    return cast("FSDP", strategy).watch_reductions() if hasattr(strategy, "plan") else None


def check_repeatable(strategy: Strategy) -> None:
    """Refuse a sharded model whose steps cannot be repeated.

    Raises:
        ValueError: If torch is too old for it.
    """
    if hasattr(strategy, "plan"):
        cast("FSDP", strategy).check_repeatable()


def share_mesh(strategy: Strategy, state: State) -> None:
    """Let the strategy and the state have one mesh of the ranks, whichever of them made it."""
    if not hasattr(strategy, "plan"):
        return
    fsdp = cast("FSDP", strategy)
    fsdp.seed = state.rank_zero_seed
    if state.device_mesh is not None:
        fsdp.mesh = state.device_mesh
    if fsdp.is_prepared:
        state.device_mesh = fsdp.mesh
        meshes = fsdp.sharded.meshes
        state.fsdp_config.device_mesh = meshes.data
        if state.tp_config is not None:
            state.tp_config.device_mesh = meshes.tensor
