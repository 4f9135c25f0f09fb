"""MixUp: train on blends of pairs of examples and of their targets."""

from typing import Any

import torch
from torch import Tensor

from composer_algorithms._arguments import accept_legacy_arguments, check_interval
from composer_algorithms._draws import draw_beta
from composer_algorithms._pairs import DrawPer, PairMixing, check_pairs
from composer_algorithms.metadata import METHODS

__all__ = ["MixUp", "mixup_batch", "METADATA"]

METADATA = METHODS["mixup"]


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
        input: Shape `(batch, ...)`. Integers are converted to the default floating point dtype.
        target: Shape `(batch, ...)`; returned permuted, not blended.
        mixing: Weight `t` in [0, 1]. Drawn when `None`.
        alpha: 0 or more. 0 disables blending; larger values blend more.
        indices: Permutation of `range(batch)`. Drawn when `None`.
        generator: CPU generator of the random numbers. PyTorch's default generator when `None`.

    Returns:
        The blended inputs, `target[indices]`, and the weight `t`.

    Raises:
        TypeError: If `alpha` or `mixing` is not a number, or `input`, `target` or `indices` not a tensor.
        ValueError: If `alpha` is negative, `mixing` is outside [0, 1], or the tensors differ in length.

    Example:
        >>> x, y = torch.rand(4, 3), torch.tensor([0, 1, 2, 3])
        >>> mixed, permuted, t = mixup_batch(x, y)
        >>> mixed.shape
        torch.Size([4, 3])

    Reference:
        Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018, arXiv:1710.09412, eq. (1).
    """
    check_pairs(input, target, indices)
    if mixing is None:
        mixing = _gen_mixing_coef(alpha, generator)
    else:
        check_interval("[0, 1]", mixing=mixing)
    if indices is None:
        # On the CPU, so that the permutation does not depend on the device of the batch.
        indices = torch.randperm(len(input), generator=generator)
    if not (input.is_floating_point() or input.is_complex()):
        input = input.to(torch.get_default_dtype())
    permuted_target = target[indices.to(target.device, non_blocking=True)]
    if mixing == 0:  # the formula would multiply the other example by 0, which is NaN for infinite values
        return input.clone(), permuted_target, mixing
    # Indexing copies, so lerp can write into the copy: one tensor as large as the batch, and two kernels.
    mixed = input[indices.to(input.device, non_blocking=True)].lerp_(input, 1 - mixing)
    return mixed, permuted_target, mixing


class MixUp(PairMixing):
    """Train each microbatch, or each batch, on blends of its examples.

    On `BEFORE_FORWARD` the inputs in `state.batch` become blends, with a new permutation and weight for each
    microbatch. With `draw_per="batch"` they are blended on `BATCH_START`, once for the whole batch, so that training
    does not depend on the number of microbatches; training metrics then see the blends.

    Targets are blended in one of two ways, which are equivalent for losses that are linear in the target, such as cross
    entropy:

    - `interpolate_loss=False`: on `BEFORE_LOSS` the targets become blends with one value per class; on `AFTER_LOSS`
      they are restored. The loss must accept such targets. Labels that are negative or the `ignore_index` of
      `torch.nn.functional.cross_entropy`, such as 255, add nothing to its loss.
    - `interpolate_loss=True`: on `BEFORE_BACKWARD` `state.loss` becomes the blend of itself and the loss for the
      other examples' targets. Works with every loss, but computes it twice; labels are smoothed both times if
      LabelSmoothing with the same `target_key` is among `state.algorithms`.

    It runs before LabelSmoothing.

    Args:
        alpha: 0 or more. 0 disables blending; larger values blend more.
        interpolate_loss: Blend the losses instead of the targets.
        input_key: Index, key or `(getter, setter)` pair of the inputs in the batch.
        target_key: The same for the targets.
        draw_per: `'microbatch'` or `'batch'`. With `'batch'`, microbatches must keep the order of the batch.

    Raises:
        TypeError: If `alpha` is not a number.
        ValueError: If `alpha` is negative or `draw_per` is anything else.

    Example:
        >>> MixUp(alpha=0.1)
        MixUp(alpha=0.1, interpolate_loss=False, input_key=0, target_key=1, draw_per='microbatch')

    Reference:
        Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018, arXiv:1710.09412. Folding the weight,
        which the paper does not do, lets each example's own input dominate without changing the distribution of blends.
    """

    schedulable = ("alpha",)

    @accept_legacy_arguments("MixUp", ignored=("num_classes",))
    def __init__(
        self,
        alpha: float = 0.2,
        interpolate_loss: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
        *,
        draw_per: DrawPer = "microbatch",
    ) -> None:
        check_interval("[0, inf)", alpha=alpha)
        super().__init__(interpolate_loss, input_key, target_key, draw_per)
        self.alpha = alpha
        self.mixing = 0.0

    @property
    def indices(self) -> Tensor:
        """Permutation of the last blended batch or microbatch."""
        return self._indices

    @property
    def permuted_target(self) -> Tensor:
        """Targets of the other examples in the blends."""
        return self._permuted_target

    def _mix(self, input: Tensor, target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
        mixed, permuted, self.mixing = mixup_batch(
            input, target, alpha=self.alpha, indices=self._indices, generator=generator
        )
        return mixed, permuted, 1 - self.mixing  # the base class expects the weight of the example itself


def _gen_mixing_coef(alpha: float, generator: torch.Generator | None = None) -> float:
    """Draw the weight of the other example."""
    # The name is Composer's: users' tests call it.
    check_interval("[0, inf)", alpha=alpha)
    if alpha == 0:
        return 0.0
    mixing = draw_beta(alpha, generator)
    return min(mixing, 1 - mixing)  # folded, so that each example dominates its own blend
