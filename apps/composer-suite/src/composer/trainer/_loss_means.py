"""Means of losses over ranks whose models may not return the same ones."""

from collections.abc import Mapping

import torch
from torch import Tensor

from composer_dist import dist
from composer_dist.strategy import Strategy

__all__ = ["TOTAL", "LossMeans"]

TOTAL = "loss/train/total"
"""The log name of the loss that is minimised."""


class LossMeans:
    """Averages the losses of each batch, by one collective whose size all ranks know.

    A model may return other losses in one batch than in the next, and on one rank than on another. What is exchanged
    is therefore made up of the names that any rank has had, with a number beside each that says who has it now. The
    ranks compare their names at the first batch, and once more after a batch in which one of them has a new one.

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
        """Return the mean of each loss over the ranks that have it. Every rank must call this."""
        self._note({name for name in losses if name != TOTAL})
        if self._is_first:
            self.compare_names()
            self._is_first = False
        total, world_size = losses[TOTAL].detach(), self._strategy.world_size
        asked = {TOTAL: total}
        for name in self._names:
            is_here = name in losses
            asked[name] = losses[name].detach() if is_here else torch.zeros_like(total)
            asked[f"{name} is here"] = torch.full_like(total, is_here * world_size, dtype=torch.float32)
        means = self._strategy.mean(asked)
        # The mean of `world_size` here and 0 elsewhere is the number of ranks that have the name.
        shared = {name: means[name] * (world_size / means[f"{name} is here"]) for name in self._names if name in losses}
        return {name: value.detach() for name, value in losses.items()} | shared | {TOTAL: means[TOTAL]}

    def _note(self, names: set[str]) -> None:
        if not names <= self._own:
            self._own |= names
            self.has_news = not self._own <= set(self._names)
