"""What a checkpoint keeps of weights besides the weights: an optimizer's state, an algorithm's averages.

It belongs to the weight that it was kept of. Where that is left out, the model has another one in its place.
"""

from collections.abc import Collection, Mapping
from logging import getLogger
from typing import TYPE_CHECKING, Any

import torch

from composer_checkpoint._state_fit import named_optimizers
from composer_checkpoint.modular._names import group_names
from composer_checkpoint.strategy_state import name_of_optimizer, owner_of
from composer_dist.strategy import canonical_name

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["leave_out_their_state"]

log = getLogger(__name__)

_MAX_NAMES = 10


def leave_out_their_state(state: "State", weights: Collection[Any], saved: Mapping[str, Any]) -> None:
    """Remove from a checkpoint what optimizers and algorithms keep of weights that are no longer in it, in place.

    Args:
        state: Has the optimizers, for checkpoints in which parameters have numbers.
        weights: The names of all weights that the checkpoint had.
        saved: The checkpoint's `state`, of which some are left out.
    """
    left_out = {*map(_plain, weights)} - {*map(_plain, saved.get("model") or ())}
    if not left_out:
        return
    removed: set[str] = set()
    for optimizer_name, saved_optimizer in (saved.get("optimizers") or {}).items():
        if not isinstance(saved_optimizer, dict) or not isinstance(saved_optimizer.get("state"), dict):
            continue
        names = _names_of_numbers(state, optimizer_name, saved_optimizer)
        for key in list(saved_optimizer["state"]):
            if (name := _plain(names.get(key, key))) in left_out:
                del saved_optimizer["state"][key]
                removed.add(name)
    pending, seen = [saved.get("algorithms")], set[int]()
    while pending:
        container = pending.pop()
        if not isinstance(container, dict | list | tuple) or id(container) in seen:
            continue
        seen.add(id(container))
        if isinstance(container, dict):
            for key in [key for key, value in container.items() if torch.is_tensor(value) and _plain(key) in left_out]:
                del container[key]
                removed.add(_plain(key))
        pending.extend(container.values() if isinstance(container, dict) else container)
    if removed:
        told = ", ".join(sorted(removed)[:_MAX_NAMES]) + (", ..." if len(removed) > _MAX_NAMES else "")
        log.warning(
            "load_ignore_keys leaves out %d weights, so what optimizers and algorithms keep of them is left out, too, "
            "and is reinitialized: %s",
            len(removed),
            told,
        )


def _names_of_numbers(state: "State", optimizer_name: str, saved: Mapping[str, Any]) -> dict[Any, str]:
    """Return the names of an optimizer's parameters by their places in its groups, as old checkpoints number them."""
    numbers = [number for group in saved.get("param_groups", ()) for number in group["params"]]
    if not any(isinstance(number, int) for number in numbers):
        return {}
    strategy: Any = owner_of(state)  # DeepSpeed's, which alone has an order of its own
    if strategy is not None:
        named = {name_of_optimizer(state, each): strategy.parameter_names(state.model) for each in state.optimizers}
    else:
        named = {name: group_names(state.model, each) for name, each in named_optimizers(state.optimizers)}
    names = [name for group in named.get(optimizer_name, ()) for name in group]
    return dict(zip(numbers, names, strict=False))  # other numbers of them are refused later


def _plain(name: object) -> str:
    """Return a weight's name without what wrappers and averages put before it."""
    plain = canonical_name(str(name))
    while plain.startswith("module."):
        plain = plain.removeprefix("module.")
    return plain
