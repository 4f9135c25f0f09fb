"""Whether all ranks begin with the same before a model is sharded, which nobody could tell afterwards."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist import RankDisagreementError, check_agreement, dist

__all__ = ["agreed", "warn_of_different_weights"]

T = TypeVar("T")


def agreed(choose: Callable[[], T], describe: Callable[[T], Mapping[str, Any]]) -> T:
    """Return what a function gives on this rank, if it gives the same on all. Every rank must call this.

    Args:
        choose: Asks no other rank.
        describe: The facts of its result that must be alike.

    Raises:
        RankDisagreementError: If the facts differ, or another rank has refused.
        Exception: What `choose` raises on this rank. Where there is no process group yet it comes at once.
    """
    try:
        chosen = choose()
    except Exception as refusal:
        with suppress(RankDisagreementError):  # what this rank has to say is more than that others do not say it
            check_agreement({"refused": f"{type(refusal).__name__}: {refusal}"})
        raise
    check_agreement({"refused": "nothing"})
    check_agreement(describe(chosen))
    return chosen


def warn_of_different_weights(model: nn.Module) -> None:
    """Warn if the ranks have different weights, of which each would keep a part. Every rank must call this."""
    if dist.get_world_size() == 1:
        return
    # What comes in parts is each rank's own.
    whole = [(name, parameter) for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    sums = dist.all_gather_object(_checksums([parameter for _, parameter in whole]))
    for index, (name, _) in enumerate(whole):
        if len({of_rank[index] for of_rank in sums}) > 1:
            warnings.warn(
                f"The ranks begin with different weights, {name!r} for one, and the sharded model is put together of "
                f"parts of them. Seed every rank alike before the model is built, or set sync_module_states=True.",
                UserWarning,
                stacklevel=2,
            )
            return


def _checksums(parameters: Sequence[torch.Tensor]) -> list[float]:
    """Return a number for each parameter that its values decide."""
    with torch.no_grad():
        if not parameters:
            return []
        sums = [parameter.double().sum() + parameter.flatten()[:1].double().sum() for parameter in parameters]
        return torch.stack([value.cpu() for value in sums]).tolist()
