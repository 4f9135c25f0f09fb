"""The rules on which modules are sharded as policies of torch's, for code that takes these."""

import warnings
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

from composer_fsdp.config import FSDP2Config
from composer_fsdp.plan import make_plan
from composer_fsdp.wrap_rules import choose_units

__all__ = ["generate_composer_model_policy", "generate_default_policy"]


def generate_default_policy(parent: nn.Module) -> CustomPolicy:
    """Return a policy that chooses the units of a plain module, the module itself among them."""
    return _policy(parent, wraps_itself=True)


def generate_composer_model_policy(composer_model: nn.Module) -> CustomPolicy:
    """Return a policy that chooses the units of a ComposerModel, which are below it."""
    return _policy(composer_model, wraps_itself=False)


def _policy(model: nn.Module, *, wraps_itself: bool) -> CustomPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # these settings are nobody's choice
        plan = make_plan(FSDP2Config(), world_size=1)
    chosen = {unit.module: dict(unit.options) for unit in choose_units(model, plan, wraps_itself=wraps_itself)}

    def decide(module: nn.Module) -> bool | dict[str, Any]:
        options = chosen.get(module)
        return False if options is None else options or True

    return CustomPolicy(decide)
