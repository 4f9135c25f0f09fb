"""Common base of MixUp and CutMix: mixing each example with another one, and their targets or losses with them."""

from abc import abstractmethod
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from composer_algorithms._arguments import check_choice
from composer_algorithms._draws import ResumableDraws
from composer_algorithms._loss import loss_for_target
from composer_algorithms._smoothed_targets import SmoothedTargets, TargetChange, are_labels
from composer_algorithms._tensors import batch_tensor, require_tensor
from composer_events import Event, Logger, State
from composer_models.targets import ensure_targets_one_hot


def check_pairs(input: Tensor, target: Tensor, indices: Tensor | None) -> None:
    """Validate that inputs, targets and permutation describe the same examples."""
    require_tensor(input, "input")
    require_tensor(target, "target")
    if input.shape[:1] != target.shape[:1] or input.ndim == 0:
        raise ValueError(
            f"target of shape {tuple(target.shape)} does not have one entry for each example of the input, whose shape "
            f"is {tuple(input.shape)}: both need the batch as their first dim."
        )
    if indices is None:
        return
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"indices={indices!r} is not a tensor of integers: pass a permutation of range({len(input)}), such as "
            f"torch.randperm({len(input)})."
        )
    if indices.shape != input.shape[:1]:
        raise ValueError(
            f"indices of shape {tuple(indices.shape)} do not pair each of {len(input)} examples with another one: pass "
            f"a permutation of range({len(input)})."
        )


DrawPer = Literal["microbatch", "batch"]

_OF_BATCHES = (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH)
_OF_TARGETS = (Event.BEFORE_LOSS, Event.AFTER_LOSS)
_TWICE_MIXED = (
    "The second one mixes images that are already mixed, but with the original targets of the other images, so the "
    "targets do not fit the images. Use one of them."
)


class PairMixing(ResumableDraws, TargetChange):
    """Base of the algorithms that mix each example with another one of its batch.

    Subclasses define in `_mix` how inputs are mixed, and may define in `smooth` how targets are mixed.
    """

    acts_on = frozenset({*_OF_BATCHES, Event.BEFORE_FORWARD, *_OF_TARGETS, Event.BEFORE_BACKWARD})
    conflicts_with = MappingProxyType(dict.fromkeys(("MixUp", "CutMix"), _TWICE_MIXED))

    def __init__(self, interpolate_loss: bool, input_key: Any, target_key: Any, draw_per: DrawPer) -> None:
        check_choice(("microbatch", "batch"), draw_per=draw_per)
        self.interpolate_loss = interpolate_loss
        self.input_key = input_key
        self.target_key = target_key
        self.draw_per = draw_per
        # Only the events that these settings need, so that the engine skips the algorithm at the others.
        self.acts_on = frozenset(
            {
                *(_OF_BATCHES if draw_per == "batch" else ()),
                Event.BEFORE_FORWARD,
                *((Event.BEFORE_BACKWARD,) if interpolate_loss else _OF_TARGETS),
            }
        )
        self._indices = torch.empty(0, dtype=torch.long)
        self._permuted_target = torch.empty(0)
        self._own_weight = 1.0  # weight of an example's own target; the other target has the rest
        self._batch_targets = torch.empty(0)  # permuted targets of the whole batch
        self._num_taken = 0  # number of those already used by microbatches

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Mix inputs, targets or losses, as the event requires."""
        if event == Event.BATCH_START:
            self._mix_inputs(state)
            self._batch_targets, self._num_taken = self._permuted_target, 0
        elif event == Event.BEFORE_TRAIN_BATCH:
            self._num_taken = 0  # the batch may start over after a microbatch ran out of memory
        elif event == Event.BEFORE_FORWARD and self.draw_per == "batch":
            self._take_targets(state)
        elif event == Event.BEFORE_FORWARD:
            self._mix_inputs(state)
        elif event == Event.BEFORE_BACKWARD and self.interpolate_loss:
            loss = require_tensor(state.loss, "the loss")
            permuted_loss = loss_for_target(state, self.target_key, self._permuted_target)
            state.loss = self._own_weight * loss + (1 - self._own_weight) * permuted_loss
        elif not self.interpolate_loss:
            super().apply(event, state, logger)

    @abstractmethod
    def _mix(self, input: Tensor, target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
        """Mix inputs with those at `self._indices`.

        Returns:
            The mixed inputs, `target[self._indices]`, and the weight of each example's own target.
        """

    def smooth(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mixture of the targets and those of the other examples."""
        permuted = self._permuted_target
        if are_labels(outputs, target) and are_labels(outputs, permuted):  # saves a tensor as large as the logits
            return SmoothedTargets.of(outputs, target, permuted, own_weight=self._own_weight)
        return torch.lerp(
            ensure_targets_one_hot(outputs, permuted), ensure_targets_one_hot(outputs, target), self._own_weight
        )

    def _mix_inputs(self, state: State) -> None:
        input = batch_tensor(state, self.input_key, "input_key")
        target = batch_tensor(state, self.target_key, "target_key")
        generator = self.next_generator(state)
        self._indices = torch.randperm(len(input), generator=generator)
        mixed, self._permuted_target, self._own_weight = self._mix(input, target, generator)
        state.batch_set_item(self.input_key, mixed)

    def _take_targets(self, state: State) -> None:
        target = batch_tensor(state, self.target_key, "target_key")
        end = self._num_taken + len(target)
        if end > len(self._batch_targets):
            raise RuntimeError(
                f"draw_per='batch': microbatches up to now have {end} examples, and the batch of the last BATCH_START "
                f"had {len(self._batch_targets)}. Run BATCH_START with the whole batch in state.batch before splitting "
                f"it, or use draw_per='microbatch'."
            )
        part = self._batch_targets[self._num_taken : end]
        self._permuted_target = part.to(target.device, non_blocking=True)
        self._num_taken = end
