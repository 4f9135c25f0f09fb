"""The rules on which modules are sharded as policies of torch's, for code that takes or gives these."""

import warnings
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, _Policy  # torch has no public name for their base

from composer_fsdp.config import FSDP2Config
from composer_fsdp.plan import make_plan
from composer_fsdp.unit_options import WrapFunction
from composer_fsdp.wrap_rules import choose_units

__all__ = ["function_of_policy", "generate_composer_model_policy", "generate_default_policy"]


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
