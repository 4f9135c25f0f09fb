"""The batches of the evaluations that a training makes, which come again after a resumption."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from composer_checkpoint.seeded_batches import SeededBatches, can_be_seeded, derive_seed, seeded
from composer_dist import get_global_rank
from composer_events.evaluator import Evaluator
from composer_events.state import State

__all__ = ["EvaluationBatches"]


class EvaluationBatches:
    """Opens the dataloaders of evaluators, so that what a DataLoader draws follows from the training's batch alone.

    Otherwise it would matter to the rest of training whether persistent workers had been started before or not.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._seeded: dict[int, SeededBatches] = {}  # kept, since the workers may persist

    def open(self, evaluator: Evaluator) -> Iterator[Any]:
        """Return the batches of an evaluation that is made now."""
        loader, batch = evaluator.dataloader.dataloader, self._state.timestamp.num_batches
        seed = derive_seed(self._state.rank_zero_seed, "evaluation", evaluator.label)
        if isinstance(loader, DataLoader) and can_be_seeded(loader):
            batches = self._seeded.setdefault(id(loader), SeededBatches(loader, get_global_rank()))
            return batches.open(seed, batch)
        if isinstance(loader, DataLoader):
            with seeded(derive_seed(seed, batch, get_global_rank())):
                return iter(loader)
        return iter(loader)
