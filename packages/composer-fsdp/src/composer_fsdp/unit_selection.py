"""Choice of the modules to shard, checked on all ranks before any collective."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from composer_dist.wrapping import canonical_name
from composer_fsdp.activation import chosen_for_checkpointing, warn_of_none_chosen
from composer_fsdp.checks import warn
from composer_fsdp.mixed_precision import resolve_dtypes
from composer_fsdp.plan import ShardingPlan, WrapFunction
from composer_fsdp.state_dicts import check_optimizers, names_of_parameters
from composer_fsdp.tensor_parallel import agreed, check_layer_plan
from composer_fsdp.wrap_rules import Unit, choose_units, has_forward, stays_whole


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen modules of a model.

    Attributes:
        units: The modules that are sharded as one, descendants first.
        recomputed: The modules with activation checkpointing or offloading.
        names: The names of the parameters.
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
    """Choose the units and validate model, plan and optimizers together. Every rank must call this.

    The model is not changed. If one rank raises, or if the ranks choose differently, all ranks raise. The arguments are
    those of `shard_model`.
    """

    def by_rules() -> Choice:
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
            first: dict[nn.Module, str] = {}
            for name, module in model.named_modules(remove_duplicate=False):
                if module in first and next(module.parameters(), None) is not None:
                    raise ValueError(
                        f"the model has duplicate module references, {first[module]!r} and {name!r}, and rank 0's "
                        f"weights are broadcast by name. Keep the module under one name, or load the weights on every "
                        f"rank."
                    )
                first[module] = name
        recomputed = frozenset(chosen_for_checkpointing(model, check_fn) if recomputes else ())
        if recomputes and not recomputed:
            warn_of_none_chosen(model, stacklevel=2)
        return Choice(units, recomputed, names)

    return agreed(by_rules, partial(_facts, model, plan))


def units_of(
    model: nn.Module, plan: ShardingPlan, *, wraps_itself: bool, wrap_fn: WrapFunction | None = None
) -> list[Unit]:
    """Return the units of a model under a plan, after checking that each can be sharded. The model is not changed.

    The arguments and errors are those of `choose`.
    """
    units = choose_units(model, plan, wraps_itself=wraps_itself, wrap_fn=wrap_fn)
    units = resolve_ties(model, units, plan.tie_policy, left_whole(model, plan))
    check_units(model, units, plan)
    return units


def _facts(model: nn.Module, plan: ShardingPlan, choice: Choice) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks, as values without addresses in their `repr`."""
    names = {module: canonical_name(name) for name, module in model.named_modules()}
    return {
        "settings": plan.facts(),
        "units": {
            unit.name or "the model": {
                "sharded with": [names[partner] for partner in unit.partners],
                # Lists of ranks, groups and functions differ between ranks.
                **{
                    key: value if isinstance(value, str | int | None) else type(value).__name__
                    for key, value in sorted(unit.options.items())
                    if key != "mixed_precision"
                },
                "mixed_precision": resolve_dtypes(unit.options.get("mixed_precision", plan.dtypes), plan.precision),
            }
            for unit in choice.units
        },
        "modules computed again": sorted(names[module] for module in choice.recomputed),
        "ignored_modules": sorted(names[module] for module in plan.ignored_modules if module in names),
    }


def left_whole(model: nn.Module, plan: ShardingPlan) -> set[nn.Parameter]:
    """Return the parameters that are never sharded: of ignored modules, and those without rows to share."""
    ignored = {p for module in plan.ignored_modules for p in module.parameters()}
    return ignored | {p for p in model.parameters() if stays_whole(p)}


def check_units(model: nn.Module, units: Sequence[Unit], plan: ShardingPlan) -> None:
    """Raise for units whose weights cannot be sharded together, and warn of units that would never be gathered."""
    names = {parameter: canonical_name(name) for name, parameter in model.named_parameters()}
    taken = left_whole(model, plan)
    for unit in units:
        called = f"the module {unit.name!r}" if unit.name else "the model"
        inside = [module for outer in _modules(unit) for module in outer.modules()]
        if any(isinstance(module, FSDPModule) for module in _modules(unit)):
            raise ValueError(
                f"{called} is sharded already. Pass a model that is not sharded, or set auto_wrap=False to keep its "
                f"sharding."
            )
        own = {p: names[p] for module in inside for p in module.parameters(recurse=False) if p not in taken}
        taken.update(own)  # nested units come first, so each parameter is checked in its own unit only
        sparse: dict[Any, nn.Module] = {
            m.weight: m for m in inside if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        }
        _refuse_unshardable(called, own, sparse)
        if own and not has_forward(unit.module):
            warn(
                f"{called} is sharded as one, and its class {type(unit.module).__name__} has no forward, so that its "
                f"weights are never gathered. Make it an nn.ModuleList or nn.ModuleDict, or name the methods that "
                f"compute with them in its attribute fsdp_forward_methods.",
                stacklevel=2,
            )


def _refuse_unshardable(called: str, own: Mapping[nn.Parameter, str], sparse: Mapping[nn.Parameter, nn.Module]) -> None:
    by_format: dict[torch.dtype, str] = {}  # of trainable weights, whose gradients FSDP2 reduces together
    for parameter, name in own.items():
        if parameter.requires_grad:
            by_format.setdefault(parameter.dtype, name)
            if parameter in sparse:
                raise ValueError(
                    f"{called} has {sparse[parameter]!r}, whose gradients are sparse tensors, which cannot be sharded. "
                    f"Make it with sparse=False."
                )
            if parameter.is_complex():
                raise ValueError(
                    f"the parameter {name!r} is {parameter.dtype}, and only the real part of its gradients would be "
                    f"averaged. Store it as real numbers (torch.view_as_real), and convert them in forward."
                )
    if len(by_format) > 1:
        listed = ", ".join(f"{name!r} in {str(dtype).removeprefix('torch.')}" for dtype, name in by_format.items())
        raise ValueError(
            f"{called} is sharded as one and has weights of several dtypes: {listed}. Make the modules of each dtype "
            f"units of their own with fsdp_wrap_fn, or build the model in one dtype; mixed_precision sets the dtype of "
            f"computation."
        )


def get_standalone_and_tied_modules(modules: Sequence[nn.Module]) -> tuple[list[nn.Module], set[nn.Module]]:
    """Return the modules that share no weights with another one of the list, and the set of those that do.

    A nested module shares its weights with the outer one. Modules without parameters are in neither result.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters():
            owners.setdefault(id(parameter), []).append(module)
    tied = {module for sharing in owners.values() if len(sharing) > 1 for module in sharing}
    standalone = [m for m in modules if m not in tied and next(m.parameters(), None) is not None]
    return standalone, tied


def legalize_param_sharing_between_modules(
    model: nn.Module, modules_to_shard: Sequence[nn.Module], whole: Collection[nn.Parameter] = ()
) -> None:
    """Raise if modules share weights with a part of the model that is not sharded together with them.

    Args:
        model: The model with all the modules.
        modules_to_shard: Modules that are sharded separately.
        whole: Parameters that are never sharded, which any module may share.

    Raises:
        ValueError: If a module outside the list has one of their weights.
    """
    names = {id(module): name for name, module in model.named_modules()}
    spared = set(map(id, whole))
    owner = {id(p): module for module in modules_to_shard for p in module.parameters() if id(p) not in spared}
    listed = {id(module) for module in modules_to_shard}
    for module in _outside(model, listed, set()):
        for parameter in module.parameters(recurse=False):
            if id(parameter) in owner:
                raise ValueError(
                    f"Parameter sharing detected between modules to be sharded and module "
                    f"{names.get(id(module), '')!r}: {names.get(id(owner[id(parameter)]), '')!r} has the same weights. "
                    f"Shard the module that holds both instead, or keep weights of its own for each."
                )


@contextmanager
def check_param_tying(model: nn.Module) -> Iterator[None]:
    """Check that the body neither ties weights nor separates tied ones.

    Raises:
        RuntimeError: On leaving, if the groups of names of one parameter have changed.
    """
    before = _name_groups(model)
    yield
    after = _name_groups(model)
    if before != after:
        changed = sorted(", ".join(sorted(names)) for names in before ^ after if len(names) > 1)
        raise RuntimeError(
            f"Parameter tying relationship changed during the context: of {'; '.join(changed)}. Assign the shared "
            f"weight to all its names again where it is replaced."
        )


def resolve_ties(
    model: nn.Module, units: Sequence[Unit], policy: str, whole: Collection[nn.Parameter] = ()
) -> list[Unit]:
    """Return units that share no weights with each other, descendants first."""
    resolved = _grouped(units, policy, set(whole))
    for root in [unit for unit in resolved if unit.is_root]:
        inside = set(root.module.modules())
        below = [m for u in resolved if not u.is_root and u.module in inside for m in _modules(u)]
        # No unit may share weights with a part of the root's own unit, at any depth.
        for module in (root.module, *below):
            deeper = set(module.modules()) - {module}
            legalize_param_sharing_between_modules(module, [m for m in below if m in deeper], whole)
    legalize_param_sharing_between_modules(model, [m for u in resolved if u.is_root for m in _modules(u)], whole)
    return resolved


def _grouped(units: Sequence[Unit], policy: str, whole: set[nn.Parameter]) -> list[Unit]:
    """Return the units, those that share weights as one, in the place of the first of them."""
    inside = {unit.module: set(unit.module.modules()) for unit in units}
    weights = {unit.module: set(unit.module.parameters()) - whole for unit in units}

    def share(one: nn.Module, other: nn.Module) -> bool:
        is_nested = other in inside[one] or one in inside[other]
        return not is_nested and not weights[one].isdisjoint(weights[other])

    resolved: list[Unit] = []
    for unit in units:
        # A unit may share weights with several earlier units that share none with each other; it joins them all.
        first, *others = [*(other for other in resolved if share(other.module, unit.module)), unit]
        for other in others:
            if policy != "group" or first.is_root or other.is_root:
                raise ValueError(
                    f"Detected tied parameters between modules designated for FSDP wrapping: {first.name!r} and "
                    f"{other.name!r} have the same weights. Shard the module that holds both instead, or set "
                    f"tie_policy='group' to shard the two together."
                )
            inside[first.module] |= inside[other.module]
            weights[first.module] |= weights[other.module]
            resolved = [each for each in resolved if each is not other]
        if others:
            partners = (*first.partners, *(module for other in others for module in _modules(other)))
            resolved[resolved.index(first)] = replace(first, partners=partners)
        else:
            resolved.append(unit)
    return resolved


def _modules(unit: Unit) -> tuple[nn.Module, ...]:
    return (unit.module, *unit.partners)


def _outside(module: nn.Module, listed: set[int], seen: set[int]) -> Iterator[nn.Module]:
    """Yield a module and its descendants, except the listed modules and theirs."""
    if id(module) in seen or id(module) in listed:
        return
    seen.add(id(module))
    yield module
    for child in module.children():
        yield from _outside(child, listed, seen)


def _name_groups(model: nn.Module) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(canonical_name(name))
    return {frozenset(names) for names in groups.values()}
