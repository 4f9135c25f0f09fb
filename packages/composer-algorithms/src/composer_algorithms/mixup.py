"""MixUp: train on blends of two examples and of their targets."""

import math
import random
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from composer_algorithms._batch import batch_tensor, require_tensor
from composer_algorithms._legacy import accept_legacy_arguments
from composer_algorithms._loss import loss_for_target
from composer_algorithms._random import ResumableDraws
from composer_algorithms.metadata import Metadata
from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_models.targets import ensure_targets_one_hot

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["MixUp", "mixup_batch", "METADATA"]

METADATA = Metadata(
    name="MixUp",
    class_name="MixUp",
    functional="mixup_batch",
    tldr="Blends pairs of examples and labels",
    attribution="(Zhang et al, 2017)",
    link="https://arxiv.org/abs/1710.09412",
    domains=("cv",),
    summary=(
        "Trains on weighted averages of two examples of a batch and on equally weighted averages of their targets, "
        "which keeps the model from memorising single examples."
    ),
    use=(
        "Use alpha=0.2 on ImageNet and alpha=1.0 on CIFAR-10. Recommended for image classification when training is "
        "long enough to overfit; gains shrink beside other regularizers such as CutMix. It costs next to nothing."
    ),
)


@accept_legacy_arguments(
    "mixup_batch",
    renamed={"interpolation_lambda": "mixing"},
    ignored=("n_classes", "num_classes"),
    num_classes_position=2,
)
def mixup_batch(
    input: Tensor,
    target: Tensor,
    mixing: float | None = None,
    alpha: float = 0.2,
    indices: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Blend each example of a batch with another one of the same batch.

    With weight `t` drawn from `Beta(alpha, alpha)` and folded to `t <= 0.5`, the result is
    `(1 - t) * input + t * input[indices]`. The inputs are not changed.

    Args:
        input: Shape `(batch, ...)`. Integers are converted to the default floating dtype, other dtypes stay.
        target: Shape `(batch, ...)`; returned permuted, not blended.
        mixing: The weight `t` in [0, 1]. Drawn when `None`.
        alpha: 0 or more. 0 blends nothing, larger blends more.
        indices: A permutation of `range(batch)`. Drawn when `None`.
        generator: On the CPU; what is drawn comes from it. PyTorch's default generator when `None`.

    Returns:
        The blended inputs, `target[indices]`, and the weight that was used.

    Raises:
        ValueError: If `alpha` is negative, `mixing` lies outside [0, 1], or `input` and `target` differ in length.

    Example:
        >>> x, y = torch.rand(4, 3), torch.tensor([0, 1, 2, 3])
        >>> mixed, permuted, t = mixup_batch(x, y)
        >>> mixed.shape
        torch.Size([4, 3])

    Reference:
        Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018, arXiv:1710.09412, eq. (1).
    """
    if input.shape[:1] != target.shape[:1]:
        raise ValueError(
            f"target of shape {tuple(target.shape)} does not have one entry for each example of the input, whose shape "
            f"is {tuple(input.shape)}: both need the batch as their first dim."
        )
    if mixing is None:
        mixing = _draw_mixing(alpha, generator)
    elif not 0 <= mixing <= 1:
        raise ValueError(f"mixing={mixing!r} is not a weight: pass a number from 0 to 1, or None to draw it.")
    if indices is None:
        indices = torch.randperm(len(input), generator=generator)
    if not (input.is_floating_point() or input.is_complex()):
        input = input.to(torch.get_default_dtype())
    permuted_target = target[indices.to(target.device, non_blocking=True)]
    if mixing == 0:  # the formula makes NaN of infinite values: it multiplies what is left out by zero
        return input.clone(), permuted_target, mixing
    # The copy that indexing makes takes the result: one tensor of the batch's size and two kernels.
    mixed = input[indices.to(input.device, non_blocking=True)].lerp_(input, 1 - mixing)
    return mixed, permuted_target, mixing


class MixUp(ResumableDraws, Algorithm):
    """Train each microbatch, or each batch, on blends of its examples.

    On `BEFORE_FORWARD` the inputs in `state.batch` become blends; permutation and weight are drawn anew for each
    microbatch. With `draw_per="batch"` that happens on `BATCH_START`, once for the whole batch, so that training does
    not depend on how the batch is cut; metrics of training then see the blends. On `BEFORE_FORWARD` each microbatch
    gets its part of the targets, in the batch's order, from the beginning after every `BEFORE_TRAIN_BATCH`.

    Then one of two, which are the same for losses that are linear in the target, as cross entropy is:

    - `interpolate_loss=False`: on `BEFORE_LOSS` the targets become blends with one value for each class, and on
      `AFTER_LOSS` they are restored. The loss must accept such targets.
    - `interpolate_loss=True`: on `BEFORE_BACKWARD` `state.loss` becomes the blend of itself and the loss for the
      other examples' targets. Works with every loss, and computes it twice; labels are smoothed both times if
      LabelSmoothing with the same `target_key` is among `state.algorithms`.

    It runs before LabelSmoothing. Its draws depend on the run's seed, the rank and how many there were before; with
    the state of a checkpoint a run goes on with the draws that it would have made.

    Args:
        alpha: 0 or more. 0 blends nothing, larger blends more.
        interpolate_loss: Blend the losses instead of the targets.
        input_key: Where the batch holds the inputs: an index, a key, or a `(getter, setter)` pair.
        target_key: Where it holds the targets.
        draw_per: `'microbatch'` or `'batch'`. What is cut from a batch has to keep its order with `'batch'`.

    Raises:
        ValueError: If `alpha` is negative or `draw_per` is neither.

    Example:
        >>> MixUp(alpha=0.1)
        MixUp(alpha=0.1, interpolate_loss=False, input_key=0, target_key=1, draw_per='microbatch')

    Reference:
        Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018, arXiv:1710.09412. The paper does not fold
        the weight; folded, the example whose place it is always dominates, and the distribution of blends is the same.
    """

    @accept_legacy_arguments("MixUp", ignored=("num_classes",))
    def __init__(
        self,
        alpha: float = 0.2,
        interpolate_loss: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
        *,
        draw_per: Literal["microbatch", "batch"] = "microbatch",
    ) -> None:
        _check_alpha(alpha)
        if draw_per not in ("microbatch", "batch"):
            raise ValueError(f"draw_per={draw_per!r} is neither 'microbatch' nor 'batch': pass one of them.")
        self.alpha = alpha
        self.interpolate_loss = interpolate_loss
        self.input_key = input_key
        self.target_key = target_key
        self.draw_per = draw_per
        self.mixing = 0.0
        self.indices = torch.empty(0, dtype=torch.long)
        self.permuted_target = torch.empty(0)
        self._original_target: Tensor | None = None
        self._batch_targets = torch.empty(0)  # the permuted ones of a whole batch
        self._num_taken = 0  # how many of them microbatches have got

    def match(self, event: Event, state: "State") -> bool:
        """Answer whether the event is one of those where inputs, targets or the loss change."""
        if self.draw_per == "batch" and event in (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH):
            return True
        if self.interpolate_loss:
            return event in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)
        return event in (Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: "State", logger: "Logger | None") -> None:
        """Blend what belongs to the event."""
        if event == Event.BATCH_START:
            self._blend_inputs(state)
            self._batch_targets, self._num_taken = self.permuted_target, 0
        elif event == Event.BEFORE_TRAIN_BATCH:
            self._num_taken = 0
        elif event == Event.BEFORE_FORWARD and self.draw_per == "batch":
            self._take_targets(state)
        elif event == Event.BEFORE_FORWARD:
            self._blend_inputs(state)
        elif event == Event.BEFORE_LOSS and not self.interpolate_loss:
            self._blend_targets(state)
        elif event == Event.AFTER_LOSS and self._original_target is not None:
            state.batch_set_item(self.target_key, self._original_target)
            self._original_target = None
        elif event == Event.BEFORE_BACKWARD and self.interpolate_loss:
            self._blend_losses(state)

    def __repr__(self) -> str:
        return (
            f"MixUp(alpha={self.alpha!r}, interpolate_loss={self.interpolate_loss!r}, input_key={self.input_key!r}, "
            f"target_key={self.target_key!r}, draw_per={self.draw_per!r})"
        )

    def _blend_inputs(self, state: "State") -> None:
        input = batch_tensor(state, self.input_key, "input_key")
        target = batch_tensor(state, self.target_key, "target_key")
        generator = self.next_generator(state)
        self.indices = torch.randperm(len(input), generator=generator)
        mixed, self.permuted_target, self.mixing = mixup_batch(
            input, target, alpha=self.alpha, indices=self.indices, generator=generator
        )
        state.batch_set_item(self.input_key, mixed)

    def _take_targets(self, state: "State") -> None:
        """Take the microbatch's part of the permuted targets."""
        target = batch_tensor(state, self.target_key, "target_key")
        end = self._num_taken + len(target)
        if end > len(self._batch_targets):
            raise RuntimeError(
                f"draw_per='batch': microbatches up to now have {end} examples, and the batch of the last BATCH_START "
                f"had {len(self._batch_targets)}. Let the loop run BATCH_START with the whole batch in state.batch "
                f"before it cuts it, or use draw_per='microbatch'."
            )
        part = self._batch_targets[self._num_taken : end]
        self.permuted_target = part.to(target.device, non_blocking=True)
        self._num_taken = end

    def _blend_targets(self, state: "State") -> None:
        outputs = require_tensor(state.outputs, "the model's output")
        target = batch_tensor(state, self.target_key, "target_key")
        blended = torch.lerp(
            ensure_targets_one_hot(outputs, target),
            ensure_targets_one_hot(outputs, self.permuted_target),
            self.mixing,
        )
        state.batch_set_item(self.target_key, blended)
        self._original_target = target

    def _blend_losses(self, state: "State") -> None:
        loss = require_tensor(state.loss, "the loss")
        permuted_loss = loss_for_target(state, self.target_key, self.permuted_target)
        state.loss = (1 - self.mixing) * loss + self.mixing * permuted_loss


def _draw_mixing(alpha: float, generator: torch.Generator | None) -> float:
    _check_alpha(alpha)
    if alpha == 0:
        return 0.0
    # torch.distributions takes no generator, and NumPy has one of its own. The number stays on the host, where it is
    # needed: nothing waits for a device.
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    mixing = random.Random(seed).betavariate(alpha, alpha)
    return min(mixing, 1 - mixing)


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha={alpha!r} is no parameter of Beta(alpha, alpha): pass 0 (no blending) or more.")
