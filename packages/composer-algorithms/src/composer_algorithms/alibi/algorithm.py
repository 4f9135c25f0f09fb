"""ALiBi as an Algorithm."""

import copy
import logging
import math
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from composer_algorithms._arguments import check_counts, check_interval
from composer_algorithms._method import ModelSurgery
from composer_algorithms.alibi.surgery import LEGACY_ARGUMENTS, apply_alibi, check_legacy_arguments
from composer_events.event import Event

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["Alibi"]

_log = logging.getLogger("composer.algorithms.alibi")
_LEGACY = (*LEGACY_ARGUMENTS, "attention_module_name")


class Alibi(ModelSurgery):
    """Replace position embeddings with ALiBi on `INIT`, and train on shorter sequences.

    On `AFTER_DATALOADER` each sequence of a batch is split into `1 / train_sequence_length_scaling` shorter ones: a
    tensor of shape `(B, S)` becomes `(B / scaling, S * scaling)`. Values per example, such as class labels, are
    repeated. Evaluation uses whole sequences. Loading a checkpoint of a model with ALiBi applies the algorithm.

    Args:
        max_sequence_length: Maximum length of the sequences in training and afterwards.
        train_sequence_length_scaling: Length of training sequences as a fraction of those of the dataloader.
        **legacy: Arguments of older releases, which are ignored.

    Raises:
        ValueError: If a number is not above 0; on `AFTER_DATALOADER`, if a batch cannot be split in this way.

    Example:
        >>> Alibi(max_sequence_length=1024)
        Alibi(max_sequence_length=1024,train_sequence_length_scaling=0.25)

    Reference:
        Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", ICLR
        2022, arXiv:2108.12409.
    """

    surgery_rank = 1  # before algorithms that change the layers it replaces
    acts_on = frozenset({Event.INIT, Event.AFTER_DATALOADER})

    def __init__(self, max_sequence_length: int, train_sequence_length_scaling: float = 0.25, **legacy: Any) -> None:
        check_legacy_arguments("Alibi", list(legacy), _LEGACY, "are not used any more: leave them out.", stacklevel=3)
        check_counts(max_sequence_length=max_sequence_length)
        check_interval("(0, inf)", train_sequence_length_scaling=train_sequence_length_scaling)
        self.max_sequence_length = max_sequence_length
        self.train_sequence_length_scaling = train_sequence_length_scaling
        self._applied = False

    def match(self, event: Event, state: "State") -> bool:
        """Return whether the event is the first INIT, or AFTER_DATALOADER."""
        # Only the first INIT: a second pass would act on a model that has ALiBi already.
        return (event == Event.INIT and not self._applied) or event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: "State", logger: "Logger | None") -> None:
        """Apply ALiBi to the model, or split the sequences of the batch."""
        if event == Event.INIT:
            apply_alibi(state.model, self.max_sequence_length, state.optimizers)
            self._applied = True
        elif event == Event.AFTER_DATALOADER and isinstance(state.batch, Mapping):
            state.batch = _cut(state.batch, self.train_sequence_length_scaling)

    def __repr__(self) -> str:
        return (
            f"Alibi(max_sequence_length={self.max_sequence_length},"
            f"train_sequence_length_scaling={self.train_sequence_length_scaling})"
        )


def _cut(batch: Mapping[str, Any], scaling: float) -> Mapping[str, Any]:
    if scaling == 1:
        return batch
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    sequences = {key: value for key, value in tensors.items() if value.ndim >= 2}
    if not sequences:
        return batch
    # Other tensors, such as attention masks of higher rank, may have other leading dims.
    old_size, old_length = sequences.get("input_ids", next(iter(sequences.values()))).shape[:2]
    size, length = round(old_size / scaling), round(old_length * scaling)
    if not (math.isclose(size, old_size / scaling) and math.isclose(length, old_length * scaling)):
        raise ValueError(
            f"a batch of {old_size} sequences of {old_length} tokens cannot be split into {old_size / scaling:g} of "
            f"{old_length * scaling:g} by train_sequence_length_scaling={scaling!r}: choose lengths that the scaling "
            f"divides."
        )
    # A copy, since the dataloader may keep its batches and yield them again.
    cut: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    for key, value in tensors.items():
        if value.shape[:2] == (old_size, old_length):
            cut[key] = value.reshape(size, length, *value.shape[2:])
        elif value.ndim == 1 and len(value) == old_size and size % old_size == 0:
            cut[key] = value.repeat_interleave(size // old_size)
        else:
            raise ValueError(
                f"the batch's {key!r} of shape {tuple(value.shape)} has neither a value for each of the {old_size} "
                f"times {old_length} tokens nor one for each sequence, so it cannot be split by "
                f"train_sequence_length_scaling={scaling!r}: remove it from the batch, or use a scaling of 1."
            )
    return cut
