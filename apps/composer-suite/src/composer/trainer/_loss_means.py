"""Means of losses over ranks whose models may not return the same ones."""

from collections.abc import Mapping

import torch
from torch import Tensor

from composer_dist import dist
from composer_dist.strategy import Strategy

__all__ = ["TOTAL", "LossMeans", "add_finite", "mean_total", "missing_share", "over_their_shares"]

TOTAL = "loss/train/total"
"""The log name of the loss that is minimised."""

_SHARE = "\0share"  # not part of a loss's own name
"""Ends the name of the share of a batch that has a loss, next to the loss, which is a sum weighted by such shares."""

_MISSING = "\0missing"
"""The share of a batch whose total is not finite and so left out: the mean over one label of which none counts, say."""


def add_finite(losses: dict[str, Tensor], name: str, loss: Tensor, share: float) -> None:
    """Add a microbatch's loss, weighted by its share in the batch, to those of the batch if it is finite.

    A NaN would hide the losses of the other microbatches and ranks.
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    missing = torch.nan_to_num((loss * 0).to(dtype), nan=share)
    _add(losses, name, torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0))
    _add(losses, name + _SHARE, share - missing)
    if name == TOTAL:
        _add(losses, _MISSING, missing)


def missing_share(losses: Mapping[str, Tensor]) -> Tensor:
    """Return the share of this rank's batch whose loss is not finite: 0 if all of it is."""
    total = losses[TOTAL]
    return losses[_MISSING] if _MISSING in losses else torch.nan_to_num(total * 0, nan=1.0)


def mean_total(losses: Mapping[str, Tensor], strategy: Strategy) -> Tensor:
    """Return the mean of the total over all ranks, without what is not finite. Every rank must call this."""
    sums = {name: losses[name] for name in (TOTAL, TOTAL + _SHARE, _MISSING) if name in losses}
    return over_their_shares(strategy.mean(sums))[TOTAL]


class LossMeans:
    """Averages the losses of each batch, by one collective whose size all ranks know.

    A model may return other losses in one batch than in the next, and on one rank than on another. What is exchanged
    is therefore made up of the names that any rank has had, each with the share of the batch that has it now. The ranks
    compare their names at the first batch, and once more after a batch in which one of them has a new one.

    Args:
        strategy: Takes the means.

    Attributes:
        has_news: Whether this rank has a name that the ranks have not compared.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.has_news = False
        self._strategy = strategy
        self._names: list[str] = []  # apart from the total, which every rank has in every batch
        self._own: set[str] = set()
        self._is_first = True

    def compare_names(self) -> None:
        """Find out which names there are. Every rank must call this."""
        self._names = sorted(set().union(*dist.all_gather_object(sorted(self._own))))
        self.has_news = False

    def __call__(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of each loss over the samples, of all ranks, that have it. Every rank must call this."""
        self._note({name for name in losses if name != TOTAL and name + _SHARE in losses})
        if self._is_first:
            self.compare_names()
            self._is_first = False
        total = losses[TOTAL].detach()
        none, no_share = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.float32)
        asked = {TOTAL: total, _MISSING: losses.get(_MISSING, no_share)}
        asked[TOTAL + _SHARE] = losses.get(TOTAL + _SHARE, no_share)
        for name in self._names:
            asked[name] = losses.get(name, none).detach()
            asked[name + _SHARE] = losses.get(name + _SHARE, no_share)
        means = self._strategy.mean(asked)
        return over_their_shares({name: means.get(name, value.detach()) for name, value in losses.items()})

    def _note(self, names: set[str]) -> None:
        if not names <= self._own:
            self._own |= names
            self.has_news = not self._own <= set(self._names)


def over_their_shares(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each loss over the share of the batch that has it: NaN where none of the batch has a finite one."""
    means = {
        name: loss / losses[name + _SHARE] if name + _SHARE in losses else loss
        for name, loss in losses.items()
        if not name.endswith((_SHARE, _MISSING))
    }
    if _MISSING in losses:  # otherwise the shares add up to 1 but for their rounding, and the total keeps its last bit
        means[TOTAL] = torch.where(losses[_MISSING] > 0, means[TOTAL], losses[TOTAL])
    return means


def _add(losses: dict[str, Tensor], name: str, loss: Tensor) -> None:
    losses[name] = losses[name] + loss if name in losses else loss
