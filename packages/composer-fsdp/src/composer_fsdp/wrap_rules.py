"""Rules that select the modules to shard as units.

The direct children of a model are its roots. Each is a unit that holds the parameters not claimed by nested units. For
a descendant, the first applicable rule decides:

1. `module._fsdp_wrap`, if the module has this attribute;
2. `fsdp_wrap_fn(module)` of the direct child, which returns a bool or a dict of settings for the unit;
3. its size: at least `min_params` parameters not claimed by nested units. This overrides a `False` from rule 2.

A direct child with `_fsdp_wrap = False` is not sharded. A plain module with it is not a unit; its children are the
roots. Metrics, modules without parameters and repeated modules are skipped. Containers without a `forward`, such as
`ModuleList` and `ParameterList`, are never units.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, _Policy  # torch has no public name for the base of policies
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves  # torch has no public name for it

from composer_fsdp.config import FSDP2Config
from composer_fsdp.mixed_precision import has_running_statistics
from composer_fsdp.plan import ShardingPlan, WrapFunction, answer_of, check_options, function_of, make_plan

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class Unit:
    """Module whose parameters are sharded and gathered together.

    Attributes:
        name: The module's name in the model; empty for the model itself.
        module: The module.
        is_root: Whether the unit is not nested in another one.
        options: The settings returned by `fsdp_wrap_fn` for this unit.
        partners: The modules sharded together with it because they share weights.
    """

    name: str
    module: nn.Module
    is_root: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    partners: tuple[nn.Module, ...] = ()


def choose_units(
    model: nn.Module, plan: ShardingPlan, *, wraps_itself: bool = False, wrap_fn: WrapFunction | None = None
) -> list[Unit]:
    """Return the units of a model, nested units first, without changing the model or communicating.

    `wraps_itself` makes the model itself the root, as for a plain module; `wrap_fn` replaces the roots' `fsdp_wrap_fn`.
    """
    if not plan.auto_wrap:
        return []
    known = set(model.modules())
    for module in plan.ignored_modules:
        if module not in known:
            raise ValueError(
                f"ignored_modules has a {type(module).__name__} that is not in the model. Give modules of the model "
                f"that is sharded."
            )
    if wraps_itself and wrap_fn is None:
        wrap_fn = function_of("", model)
    rules = _Rules(plan, wrap_fn)
    if wraps_itself and getattr(model, "_fsdp_wrap", None) is not False:
        rules.add_root("", model)
    else:
        for name, child in roots_of(model):
            rules.add_root(name, child)
    if not rules.units and any(p.numel() > 1 for p in model.parameters() if not is_lazy(p)):
        warnings.warn(
            f"Nothing of the {type(model).__name__} is sharded: each rank has all of it, since _fsdp_wrap=False or "
            f"ignored_modules excludes all modules with weights. Remove them from the modules to shard.",
            stacklevel=2,
        )
    return rules.units


def roots_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the potential roots: the direct children, with containers replaced by their contents."""
    for name, child in model.named_children():
        if _is_metric(child) or getattr(child, "_fsdp_wrap", None) is False:
            continue
        if _is_container(child):
            yield from roots_of(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def own_parameters(module: nn.Module, taken: set[int], ignored: set[int]) -> list[nn.Parameter]:
    """Return the parameters of a module that are neither taken, ignored nor unshardable, without duplicates."""
    return [p for p in module.parameters() if id(p) not in taken and id(p) not in ignored and not stays_whole(p)]


def stays_whole(parameter: nn.Parameter) -> bool:
    """Return whether a parameter cannot be sharded because it is a scalar or empty."""
    return not is_lazy(parameter) and (parameter.ndim == 0 or parameter.numel() == 0)


def has_forward(module: nn.Module) -> bool:
    """Return whether a module defines `forward`, or other methods in `fsdp_forward_methods`."""
    defines = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return defines or bool(getattr(module, "fsdp_forward_methods", ()))


class _Rules:
    """Traversal of the modules in post-order that collects units."""

    def __init__(self, plan: ShardingPlan, wrap_fn: WrapFunction | None) -> None:
        self.units: list[Unit] = []
        self._plan = plan
        self._wrap_fn = wrap_fn
        self._seen: set[int] = set()
        self._taken: set[int] = set()
        self._ignored_modules = {id(module) for root in plan.ignored_modules for module in root.modules()}
        self._ignored = {id(p) for module in plan.ignored_modules for p in module.parameters()}
        self._warned = False

    def add_root(self, name: str, root: nn.Module) -> None:
        if id(root) in self._seen or id(root) in self._ignored_modules:
            return
        function = self._wrap_fn or function_of(name, root)
        num_units, num_seen = len(self.units), len(self._seen)
        self._descend(name, root, function)
        # A function that several roots share may choose modules of another root only.
        is_own = function is not None and (self._wrap_fn is None or not name)
        if is_own and len(self.units) == num_units and len(self._seen) > num_seen:
            warnings.warn(
                f"fsdp_wrap_fn chooses none of the {len(self._seen) - num_seen} modules in the {type(root).__name__} "
                f"{name or 'itself'!r}, whose weights are therefore gathered all at once. Let it return True for the "
                f"layers that repeat.",
                stacklevel=2,
            )
        self._seen.add(id(root))
        choice = self._by_attribute(root)
        if choice is None:
            choice = answer_of(function, name, root)
        self._add(name, root, choice if isinstance(choice, Mapping) else {}, is_root=True)

    def _descend(self, prefix: str, parent: nn.Module, function: WrapFunction | None) -> None:
        for name, module in parent.named_children():
            full_name = f"{prefix}.{name}" if prefix else name
            if id(module) in self._seen or id(module) in self._ignored_modules or _is_metric(module):
                continue
            self._seen.add(id(module))
            # Nested units claim their parameters first, so that the size rule counts only the rest.
            self._descend(full_name, module, function)
            choice = self._decide(full_name, module, function)
            if choice is not False:
                self._add(full_name, module, choice if isinstance(choice, Mapping) else {})

    def _decide(self, name: str, module: nn.Module, function: WrapFunction | None) -> bool | Mapping[str, Any]:
        by_attribute = self._by_attribute(module)
        if by_attribute is not None:
            return by_attribute
        given = answer_of(function, name, module)
        if isinstance(given, Mapping):
            return given
        threshold = self._plan.min_params
        if threshold is not None and not _is_container(module):
            own = own_parameters(module, self._taken, self._ignored)
            # Lazy parameters have no size yet.
            given = given or sum(p.numel() for p in own if not is_lazy(p)) >= threshold
        # Modules with running statistics stay in float32, and a unit cannot mix dtypes.
        has_counts = has_running_statistics(module) and next(module.parameters(), None) is not None
        return given or (self._plan.dtypes.param.itemsize < 4 and has_counts)

    def _by_attribute(self, module: nn.Module) -> bool | None:
        if not hasattr(module, "_fsdp_wrap"):
            return None
        if self._plan.version == 2 and not self._warned:
            self._warned = True
            warnings.warn(
                "The _fsdp_wrap attribute will be removed in a future release. Please use fsdp_wrap_fn instead.",
                DeprecationWarning,
                stacklevel=2,
            )
        return bool(module._fsdp_wrap)

    def _add(self, name: str, module: nn.Module, options: Mapping[str, Any], *, is_root: bool = False) -> None:
        check_options(name, options, self._plan)
        own = own_parameters(module, self._taken, self._ignored)
        if not any(True for _ in module.parameters()) or _is_container(module):
            return
        if not own and not is_root:
            # All weights are tied to those of an earlier unit. Keep this one too, so that the check of ties sees both.
            own = [p for p in module.parameters(recurse=False) if id(p) not in self._ignored and not stays_whole(p)]
            if not own:
                return
        self._taken.update(map(id, own))
        # The user's own settings for the unit take precedence.
        if has_running_statistics(module) and self._plan.dtypes.param.itemsize < 4:
            options = {"mixed_precision": "FULL", **options}
        self.units.append(Unit(name, module, is_root, dict(options)))


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and not has_forward(module)


def _is_metric(module: nn.Module) -> bool:
    """Return whether a module is a torchmetrics metric, without importing torchmetrics."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric | torchmetrics.MetricCollection)


def generate_default_policy(parent: nn.Module) -> CustomPolicy:
    """Return a policy that selects the units of a plain module, including the module itself."""
    return _policy(parent, wraps_itself=True)


def generate_composer_model_policy(composer_model: nn.Module) -> CustomPolicy:
    """Return a policy that selects the units of a ComposerModel, excluding the model itself."""
    return _policy(composer_model, wraps_itself=False)


def function_of_policy(model: nn.Module, policy: Any) -> WrapFunction | None:
    """Return the `fsdp_wrap_fn` equivalent to a wrapping policy."""
    if isinstance(policy, _Policy):
        chosen = policy._run_policy(model, set(), {})  # the only way to evaluate a policy without FSDP1
        return lambda module: (dict(chosen[module]) or True) if module in chosen else False
    if policy is None or callable(policy):
        return cast("WrapFunction | None", policy)
    raise TypeError(
        f"the policy {policy!r} is a {type(policy).__name__}. Give a function that returns True, False or a dict of "
        f"settings for a module, or a policy of torch.distributed.fsdp.wrap."
    )


def _policy(model: nn.Module, *, wraps_itself: bool) -> CustomPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the user did not choose these settings
        plan = make_plan(FSDP2Config(), world_size=1)
    chosen = {unit.module: dict(unit.options) for unit in choose_units(model, plan, wraps_itself=wraps_itself)}

    def decide(module: nn.Module) -> bool | dict[str, Any]:
        options = chosen.get(module)
        return False if options is None else options or True  # `CustomPolicy` takes an empty dict for False

    return CustomPolicy(decide)


class Stage:
    """Tracker of the current phase of a step and the running unit.

    Attributes:
        phase: `'forward'`, `'backward'`, or a description of another phase.
    """

    def __init__(self) -> None:
        self.phase = "the beginning"
        self._units: list[str] = []
        self._backward = ""

    def place(self) -> str:
        """Describe the current place, worded to follow "in"."""
        if self.phase == "backward":
            return f"backward of {self._backward or 'the loss'}"
        if self.phase == "forward":
            return f"forward of {self._units[-1]}" if self._units else "the loss"
        return self.phase

    def watch(self, units: Sequence[Unit]) -> None:
        """Register hooks that track the running unit."""
        for unit in units:
            name = unit.name or "the model's outermost unit"
            unit.module.register_forward_pre_hook(lambda *_, name=name: self._units.append(name))
            unit.module.register_forward_hook(lambda _, __, output, name=name: self._leave(name, output))

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self._backward = phase, ""
        self._units.clear()

    def _leave(self, name: str, output: Any) -> None:
        self._units.pop()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                # The gradient of a unit's output arrives when its backward pass begins.
                tensor.register_hook(lambda _: setattr(self, "_backward", name))
