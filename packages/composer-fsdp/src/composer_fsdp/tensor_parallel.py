"""Tensor parallelism, applied before sharding."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer_dist import RankDisagreementError, check_agreement, dist
from composer_dist.wrapping import canonical_name
from composer_fsdp.config import explain_key


def check_layer_plan(model: nn.Module, layer_plan: Mapping[str, Any]) -> None:
    """Validate a tensor parallelism plan, and warn if it splits nothing."""
    if not layer_plan and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        warnings.warn(
            "tensor_parallel_degree is greater than 1, and there is no layer_plan: no tensor is split, and the ranks "
            "of a group compute the same. Give a layer_plan, such as {'blocks.*.up': ColwiseParallel()}, or leave the "
            "degree out and shard over all ranks.",
            UserWarning,
            stacklevel=2,
        )
    modules = {name: module for name, module in model.named_modules() if name}
    owners: dict[nn.Parameter, list[str]] = {}  # tied parameters have several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(canonical_name(name))
    for pattern, style in layer_plan.items():
        fitting = [name for name in modules if _fits(name, pattern)]
        if not fitting:
            raise ValueError(f"layer_plan has {pattern!r}, which fits no module. {explain_key(pattern, modules)}")
        # Other styles, including custom ones, may support any module.
        for name in fitting if isinstance(style, ColwiseParallel | RowwiseParallel) else ():
            tied = [owners[p] for p in modules[name].parameters() if len(owners[p]) > 1]
            if tied:
                raise ValueError(
                    f"layer_plan[{pattern!r}] would split {tied[0][0]!r}, which is the same weight as {tied[0][1]!r}, "
                    f"and untie the two. Leave the module out of the plan, or give each a weight of its own."
                )


def _fits(name: str, pattern: str) -> bool:
    """Return whether a module name matches a pattern component by component, as in `parallelize_module`."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


T = TypeVar("T")


def agreed(choose: Callable[[], T], describe: Callable[[T], Mapping[str, Any]]) -> T:
    """Return the result of a function after checking that all ranks agree on it. Every rank must call this.

    `choose` must not communicate. `describe` returns the facts of its result that must be equal on all ranks.
    """
    try:
        chosen = choose()
    except Exception as refusal:
        with suppress(RankDisagreementError):  # this rank's own error is more specific
            check_agreement({"refused": f"{type(refusal).__name__}: {refusal}"})
        raise
    # Matches the call of a rank that failed, which would otherwise leave this one hanging in the next collective.
    check_agreement({"refused": "nothing"})
    check_agreement(describe(chosen))
    return chosen


def warn_of_different_weights(model: nn.Module) -> None:
    """Warn if the ranks have different weights before sharding. Every rank must call this."""
    if dist.get_world_size() == 1:
        return
    # DTensors differ by rank by design.
    whole = [(name, parameter) for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    with torch.no_grad():
        # The first element counts twice, which tells apart most weights with equal sums, such as permuted ones.
        own = [(p.double().sum() + p.flatten()[:1].double().sum()).cpu() for _, p in whole]
        sums = dist.all_gather_object(torch.stack(own).tolist() if own else [])
    for index, (name, _) in enumerate(whole):
        if len({of_rank[index] for of_rank in sums}) > 1:
            warnings.warn(
                f"The ranks begin with different weights, for example {name!r}, and the sharded model consists of "
                f"parts of them. Set the same seed on every rank before building the model, or set "
                f"sync_module_states=True.",
                UserWarning,
                stacklevel=2,
            )
            return
