"""Means of losses over ranks whose models may not return the same ones."""

from collections.abc import Mapping

import torch
from torch import Tensor

from composer_dist import dist
from composer_dist.strategy import Strategy

__all__ = ["SHARE", "TOTAL", "LossMeans", "over_their_shares"]

TOTAL = "loss/train/total"
"""The log name of the loss that is minimised."""

SHARE = "\0share"  # no loss of a user's is called so
"""Ends the name of the share of a batch that has a loss, next to the loss, which is a sum weighted by such shares."""


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
        self._note({name for name in losses if name + SHARE in losses})
        if self._is_first:
            self.compare_names()
            self._is_first = False
        total = losses[TOTAL].detach()
        none, no_share = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.float32)
        asked = {TOTAL: total}
        for name in self._names:
            asked[name] = losses.get(name, none).detach()
            asked[name + SHARE] = losses.get(name + SHARE, no_share)
        means = self._strategy.mean(asked)
        return over_their_shares({name: means.get(name, value.detach()) for name, value in losses.items()})

    def _note(self, names: set[str]) -> None:
        if not names <= self._own:
            self._own |= names
            self.has_news = not self._own <= set(self._names)


def over_their_shares(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each loss over the share of the batch that has it; one that has no share, such as the total, as it is."""
    return {
        name: loss / losses[name + SHARE].clamp(min=torch.finfo(torch.float32).tiny) if name + SHARE in losses else loss
        for name, loss in losses.items()
        if not name.endswith(SHARE)
    }
