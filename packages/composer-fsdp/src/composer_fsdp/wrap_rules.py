"""Which modules are sharded as units of their own.

A model's direct children are its roots: each is a unit with all that none of its descendants takes. Of a descendant,
the first rule that speaks decides:

1. `module._fsdp_wrap`, if it has this attribute;
2. `fsdp_wrap_fn(module)` of the direct child, which returns a bool, or a dict of settings for this unit;
3. its size: at least `min_params` parameters that no unit inside it takes. It also overrules a `False` of rule 2.

A direct child with `_fsdp_wrap = False` is left alone, and a plain module that has it is no unit itself: its children
are the roots. Metrics and modules without parameters are passed over, and so are modules that are reached a second
time. What only holds others, such as a `ModuleList` or a `ParameterList`, computes nothing and is no unit.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,  # torch has no public name for their base
    _Policy,  # torch has no public name for their base
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves  # torch has no public name for it

from composer_fsdp.config import FSDP2Config
from composer_fsdp.mixed_precision import has_running_statistics
from composer_fsdp.plan import ShardingPlan, WrapFunction, answer_of, check_options, function_of, make_plan

__all__ = [
    "function_of_policy",
    "generate_composer_model_policy",
    "generate_default_policy",
    "Stage",
    "Unit",
    "WrapFunction",
    "choose_units",
    "has_forward",
    "roots_of",
    "stays_whole",
]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is sharded as one: its weights are gathered together.

    Attributes:
        name: The module's name in the model; empty for the model itself.
        module: The module.
        is_root: Whether no other unit holds it.
        options: Settings of this unit alone, as `fsdp_wrap_fn` gave them.
        partners: Modules that are sharded together with it, since they share weights.
    """

    name: str
    module: nn.Module
    is_root: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    partners: tuple[nn.Module, ...] = ()


def choose_units(
    model: nn.Module, plan: ShardingPlan, *, wraps_itself: bool = False, wrap_fn: WrapFunction | None = None
) -> list[Unit]:
    """Return the units of a model, each after those inside it. Nothing is changed, and no rank asks another one.

    Args:
        model: Whose direct children are sharded.
        plan: The settings.
        wraps_itself: Whether the model itself is the root, as a plain module is.
        wrap_fn: In place of the `fsdp_wrap_fn` of the roots.

    Raises:
        ValueError: If `fsdp_wrap_fn` returns a setting that there is not, or an ignored module is not in the model. A
            KeyError for the settings of an `FSDP2Config`.
        TypeError: If `fsdp_wrap_fn` returns neither yes, no, nor a dict.
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
            f"ignored_modules leaves out all that has weights. Take them away from what is to be sharded.",
            stacklevel=2,
        )
    return rules.units


def roots_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that may become roots: the direct children, and in place of containers what these hold."""
    for name, child in model.named_children():
        if _is_metric(child) or getattr(child, "_fsdp_wrap", None) is False:
            continue
        if _is_container(child):
            yield from roots_of(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def own_parameters(module: nn.Module, taken: set[int], ignored: set[int]) -> list[nn.Parameter]:
    """Return the parameters of a module, each once, that nobody has taken."""
    return [p for p in module.parameters() if id(p) not in taken and id(p) not in ignored and not stays_whole(p)]


def stays_whole(parameter: nn.Parameter) -> bool:
    """Say whether there is nothing to share out of a parameter: a single number without a dim, or no number at all."""
    return not is_lazy(parameter) and (parameter.ndim == 0 or parameter.numel() == 0)


def has_forward(module: nn.Module) -> bool:
    """Say whether a module computes anything when it is called, or names the methods that do."""
    defines = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return defines or bool(getattr(module, "fsdp_forward_methods", ()))


class _Rules:
    """Walks through the modules, descendants first, and collects units."""

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
        is_own = function is not None and (self._wrap_fn is None or not name)  # and not one for several roots
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
        if given or self._is_large(module):
            return True
        # A group of its own in float32, since its statistics would be mixed with weights of another format.
        return self._counts_in_low_precision(module)

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

    def _is_large(self, module: nn.Module) -> bool:
        threshold = self._plan.min_params
        if threshold is None or _is_container(module):
            return False
        own = own_parameters(module, self._taken, self._ignored)
        return sum(p.numel() for p in own if not is_lazy(p)) >= threshold

    def _counts_in_low_precision(self, module: nn.Module) -> bool:
        dtypes = self._plan.dtypes
        is_low = dtypes.param.itemsize < 4
        return is_low and has_running_statistics(module) and next(module.parameters(), None) is not None

    def _add(self, name: str, module: nn.Module, options: Mapping[str, Any], *, is_root: bool = False) -> None:
        check_options(name, options, self._plan)
        own = own_parameters(module, self._taken, self._ignored)
        if not any(True for _ in module.parameters()) or _is_container(module):
            return
        if not own and not is_root:
            # Two modules with the very same weights: both are named, so that the check of tied weights sees them.
            own = [p for p in module.parameters(recurse=False) if id(p) not in self._ignored and not stays_whole(p)]
            if not own:
                return
        self._taken.update(map(id, own))
        if has_running_statistics(module) and self._plan.dtypes.param.itemsize < 4:
            options = {"mixed_precision": "FULL", **options}
        self.units.append(Unit(name, module, is_root, dict(options)))


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and not has_forward(module)


def _is_metric(module: nn.Module) -> bool:
    """Say whether a module is of torchmetrics, which is known only to those who have loaded it."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric | torchmetrics.MetricCollection)


def generate_default_policy(parent: nn.Module) -> CustomPolicy:
    """Return a policy that chooses the units of a plain module, the module itself among them."""
    return _policy(parent, wraps_itself=True)


def generate_composer_model_policy(composer_model: nn.Module) -> CustomPolicy:
    """Return a policy that chooses the units of a ComposerModel, which are below it."""
    return _policy(composer_model, wraps_itself=False)


def function_of_policy(model: nn.Module, policy: Any) -> WrapFunction | None:
    """Return what a policy says of the modules of a model, as an `fsdp_wrap_fn` says it.

    Args:
        model: That is going to be sharded.
        policy: A policy of torch's, such as `CustomPolicy` or `ModuleWrapPolicy`; a function of a module; or `None`.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(policy, _Policy):
        chosen = policy._run_policy(model, set(), {})  # the only way to ask one without FSDP1
        return lambda module: (dict(chosen[module]) or True) if module in chosen else False
    if policy is None or callable(policy):
        return cast("WrapFunction | None", policy)
    raise TypeError(
        f"the policy {policy!r} is a {type(policy).__name__}. Give a function that returns True, False or a dict of "
        f"settings for a module, or a policy of torch.distributed.fsdp.wrap."
    )


def _policy(model: nn.Module, *, wraps_itself: bool) -> CustomPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # these settings are nobody's choice
        plan = make_plan(FSDP2Config(), world_size=1)
    chosen = {unit.module: dict(unit.options) for unit in choose_units(model, plan, wraps_itself=wraps_itself)}

    def decide(module: nn.Module) -> bool | dict[str, Any]:
        options = chosen.get(module)
        return False if options is None else options or True

    return CustomPolicy(decide)


class Stage:
    """Knows which phase of a step and which unit runs.

    Attributes:
        phase: `'forward'`, `'backward'`, or words for another one.
    """

    def __init__(self) -> None:
        self.phase = "the beginning"
        self._units: list[str] = []
        self._backward = ""

    def place(self) -> str:
        """Say what is going on, in words that follow `in`."""
        if self.phase == "backward":
            return f"backward of {self._backward or 'the loss'}"
        if self.phase == "forward":
            return f"forward of {self._units[-1]}" if self._units else "the loss"
        return self.phase

    def watch(self, units: Sequence[Unit]) -> None:
        """Follow which unit runs."""
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
                tensor.register_hook(lambda _: self._go_back(name))

    def _go_back(self, name: str) -> None:
        self._backward = name
