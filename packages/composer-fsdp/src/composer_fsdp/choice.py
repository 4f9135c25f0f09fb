"""What of a model is going to be sharded, chosen and compared before any rank waits for another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composer_dist.strategy import canonical_name
from composer_fsdp.activation import chosen_for_checkpointing, warn_of_none_chosen
from composer_fsdp.agreement import agreed
from composer_fsdp.mixed_precision import resolve_dtypes
from composer_fsdp.optimizers import check_optimizers, names_of_parameters
from composer_fsdp.plan import ShardingPlan
from composer_fsdp.shardable import check_units, left_whole
from composer_fsdp.tensor_parallel import check_layer_plan
from composer_fsdp.tied import resolve_ties
from composer_fsdp.unit_options import WrapFunction
from composer_fsdp.wrap_rules import Unit, choose_units

__all__ = ["Choice", "choose", "units_of"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of the modules of a model.

    Attributes:
        units: What is sharded as one, descendants first.
        recomputed: The modules whose activations are computed again, or wait on the host.
        names: The parameters, and their names.
    """

    units: Sequence[Unit]
    recomputed: frozenset[nn.Module]
    names: Mapping[nn.Parameter, str]


def choose(
    model: nn.Module,
    plan: ShardingPlan,
    optimizers: Sequence[Optimizer] = (),
    *,
    wraps_itself: bool = False,
    wrap_fn: WrapFunction | None = None,
    check_fn: Callable[[nn.Module], bool] | None = None,
) -> Choice:
    """Return what the rules choose, having refused what does not go together. Every rank must call this.

    Nothing is changed. What one rank refuses, all of them do, and so they do where their choices are not the same.

    Args:
        model: As it was built.
        plan: How it is going to be sharded.
        optimizers: Made for the model.
        wraps_itself: Whether the model itself is the root, in place of its children.
        wrap_fn: In place of the `fsdp_wrap_fn` of the roots.
        check_fn: In place of the `activation_checkpointing_fn` of the children.

    Raises:
        ValueError, KeyError, TypeError, NotImplementedError, RuntimeError: If model, optimizers and plan do not go
            together, and on the other ranks a ValueError that says so.
    """
    by_rules = partial(_by_rules, model, plan, optimizers, wraps_itself, wrap_fn, check_fn)
    return agreed(by_rules, partial(_facts, model, plan))


def units_of(
    model: nn.Module, plan: ShardingPlan, *, wraps_itself: bool, wrap_fn: WrapFunction | None = None
) -> list[Unit]:
    """Return the units that a plan makes of a model, each of which can be sharded. Nothing is changed.

    Args:
        model: As it was built.
        plan: How it is going to be sharded.
        wraps_itself: Whether the model itself is the root, in place of its children.
        wrap_fn: In place of the `fsdp_wrap_fn` of the roots.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: If model and plan do not go together.
    """
    units = choose_units(model, plan, wraps_itself=wraps_itself, wrap_fn=wrap_fn)
    units = resolve_ties(model, units, plan.tie_policy, left_whole(model, plan))
    check_units(model, units, plan)
    return units


def _by_rules(
    model: nn.Module,
    plan: ShardingPlan,
    optimizers: Sequence[Optimizer],
    wraps_itself: bool,
    wrap_fn: WrapFunction | None,
    check_fn: Callable[[nn.Module], bool] | None,
) -> Choice:
    units = units_of(model, plan, wraps_itself=wraps_itself, wrap_fn=wrap_fn)
    recomputes = bool(plan.activation_checkpointing or plan.activation_cpu_offload)
    if check_fn is not None and not recomputes:
        raise ValueError(
            "a function chooses modules for activation checkpointing, and neither activation_checkpointing nor "
            "activation_cpu_offload is on. Set one of them, or leave the function out."
        )
    names = names_of_parameters(model)
    splits = plan.layer_plan is not None
    check_optimizers(optimizers, names, use_orig_params=plan.use_orig_params, splits_tensors=splits)
    if plan.layer_plan is not None:
        check_layer_plan(model, plan.layer_plan)
    if (plan.sync_module_states and plan.auto_wrap) or plan.load_monolith_rank0_only:
        _refuse_duplicates(model)
    recomputed = frozenset(chosen_for_checkpointing(model, check_fn) if recomputes else ())
    if recomputes and not recomputed:
        warn_of_none_chosen(model, stacklevel=2)
    return Choice(units, recomputed, names)


def _refuse_duplicates(model: nn.Module) -> None:
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if module in names and next(module.parameters(), None) is not None:
            raise ValueError(
                f"the model has duplicate module references, {names[module]!r} and {name!r}, and rank 0's weights are "
                f"handed on by name. Keep the module under one name, or give every rank the weights itself."
            )
        names[module] = name


def _facts(model: nn.Module, plan: ShardingPlan, choice: Choice) -> dict[str, Any]:
    """Return what the ranks must have alike, as values whose `repr` has no addresses."""
    names = {module: canonical_name(name) for name, module in model.named_modules()}
    return {
        "settings": _settings(plan),
        "units": {
            unit.name or "the model": {
                "sharded with": [names[partner] for partner in unit.partners],
                **{key: _fact(key, value, plan) for key, value in sorted(unit.options.items())},
            }
            for unit in choice.units
        },
        "modules computed again": sorted(names[module] for module in choice.recomputed),
        "ignored_modules": sorted(names[module] for module in plan.ignored_modules if module in names),
    }


def _settings(plan: ShardingPlan) -> dict[str, Any]:
    settings = plan.to_dict()
    # Ranks may belong to different parts of one mesh, and give different lists of ranks, which are compared later.
    if plan.device_mesh is not None:
        settings["device_mesh"] = (plan.device_mesh.mesh_dim_names, tuple(plan.device_mesh.shape))
    settings["process_group"] = _fact("process_group", plan.process_group, plan)
    return settings


def _fact(key: str, value: Any, plan: ShardingPlan) -> Any:
    if key == "mixed_precision":
        return resolve_dtypes(value, plan.precision)
    # Lists of ranks, groups and functions are each rank's own.
    return value if isinstance(value, str | int | None) else type(value).__name__
