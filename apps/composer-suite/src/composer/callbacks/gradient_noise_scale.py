"""The gradient noise scale: the batch size above which larger batches give diminishing returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from composer_algorithms.gradient_clipping import joint_norm
from composer_algorithms.module_surgery import has_flat_parameters, is_dtensor
from composer_dist import dist
from composer_events.arguments import check_counts
from composer_events.batches import count_samples
from composer_events.callback import Callback
from composer_events.logger import log_lazily

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["GradientNoiseScale"]

_NAME = "gradient_noise_scale"


class GradientNoiseScale(Callback):
    """Log the simple noise scale `tr(S) / |G|^2` of gradients: `S` is the covariance over samples, `G` the mean.

    With batches much smaller than the noise scale, a batch twice as large needs half as many steps; with much larger
    ones, it needs about as many. Logged are `gradient_noise_scale/samples`, and the two terms as
    `gradient_noise_scale/trace` and `gradient_noise_scale/squared_norm`, from running means of both.

    They are estimated from the squared norms of the gradient of the batch and of those of its parts, the microbatches
    of each rank, before clipping. For weights sharded by FSDP2 or tensor parallelism, only microbatches are parts,
    since no rank has whole gradients of its own. Ranks are assumed to have equally many samples, and losses to be means
    over samples.

    A measured batch needs a norm for each parameter and part, and the ranks exchange one number. The callback does not
    synchronize with the accelerator: values are read when a logger reads them.

    Args:
        interval: Interval of measured batches.
        smoothing: Weight of earlier batches in the running means, at least 0 and less than 1. The estimate of a single
            batch is noisy, and can be negative.

    Raises:
        ValueError: If an argument is out of range; in training, if a batch has a single part, the model is sharded by
            FSDP1 or DeepSpeed, or several ranks adapt the size of microbatches.

    Example:
        >>> monitor = GradientNoiseScale(interval=5)

    Reference:
        McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.1.
    """

    reads_gradients: ClassVar[bool] = True

    def __init__(self, interval: int = 10, smoothing: float = 0.95) -> None:
        check_counts(interval=interval)
        if isinstance(smoothing, bool) or not 0 <= smoothing < 1:
            raise ValueError(f"smoothing={smoothing!r} must be at least 0 and less than 1.")
        self.interval = interval
        self.smoothing = smoothing
        self._means: Tensor | None = None  # of the trace, of the squared norm, and the sum of the weights in both
        self._hooks: list[RemovableHandle] = []
        self._of_parts: list[Tensor] = []
        self._of_batch: Tensor | None = None
        self._sizes: list[int] = []  # of the microbatches
        self._num_samples = 0  # before the batch
        self._measures = self._is_sharded = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reject settings under which gradients of parts cannot be seen."""
        if has_flat_parameters(state.model):
            raise ValueError(
                "GradientNoiseScale cannot read the norms of gradients that FSDP1 shards. Use FSDP2, or leave it out."
            )
        self._is_sharded = any(map(is_dtensor, state.model.parameters()))
        if state.auto_microbatching and not self._is_sharded and dist.get_world_size() > 1:
            raise ValueError(
                "GradientNoiseScale needs a fixed size of microbatches on several ranks, which otherwise average their "
                "gradients only after the last one. Set device_train_microbatch_size to a number, or leave it out."
            )

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Begin a batch, if it is one to measure."""
        self._end_batch()  # an attempt may have failed
        self._num_samples = int(state.timestamp.sample)
        self._measures = int(state.timestamp.batch) % self.interval == 0
        if self._measures and not self._is_sharded:
            # These see the gradients of this rank before DDP averages them.
            self._hooks = [
                each.register_hook(self._note_part) for each in state.model.parameters() if each.requires_grad
            ]

    def after_backward(self, state: State, logger: Logger) -> None:
        """Compute the norm of the gradients up to this microbatch."""
        if not self._measures:
            return
        gradients = [each.grad.detach() for each in state.model.parameters() if each.grad is not None]
        self._of_batch = joint_norm(gradients)
        self._sizes.append(count_samples(state.batch))
        if self._is_sharded and len(self._sizes) == 1:
            self._of_parts.append(self._of_batch)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the noise scale, if the batch was measured."""
        if self._of_batch is None:
            return
        num, size = len(self._sizes), int(state.timestamp.sample) - self._num_samples
        weights = [each / sum(self._sizes) for each in self._sizes]  # of the microbatches in the gradient
        num_ranks = 1 if self._is_sharded else dist.get_world_size()
        whole, parts = self._of_batch.square(), torch.stack(self._of_parts).square().sum()
        self._end_batch()
        if num * num_ranks == 1:
            if self._means is not None:  # a last, smaller batch
                return
            also = "" if self._is_sharded else ", or train on several ranks"
            raise ValueError(
                f"GradientNoiseScale compares the gradient of a batch with those of its parts, and this batch has one "
                f"part. Set device_train_microbatch_size to at most half of the batch of a rank{also}."
            )
        if num_ranks > 1:
            dist.all_reduce(parts)
            parts = parts / num_ranks
        # E|whole|^2 = G^2 + trace / size. A part of n samples has a weight w in the gradient of its rank, so that
        # E|w part|^2 = w^2 G^2 + w^2 trace / n. If sharded, n counts the samples of all ranks, and the first part is
        # measured, else the sum over all parts of a rank, with w / n = num_ranks / size.
        share, per_trace = sum(weight**2 for weight in weights), num_ranks / size
        if self._is_sharded:
            share, per_trace = weights[0] ** 2, weights[0] / size
        trace = (parts - share * whole) / (per_trace - share / size)
        measured = torch.stack([trace, whole - trace / size, torch.ones_like(trace)])
        means = torch.zeros_like(measured) if self._means is None else self._means.to(measured.device)
        # After an overflow in float16, the scaler skips the step.
        self._means = torch.where(measured.isfinite().all(), means.lerp(measured, 1 - self.smoothing), means)
        log_lazily(state, logger, _metrics, self._means)

    def state_dict(self) -> dict[str, Any]:
        """Return the running means."""
        return {"means": None if self._means is None else self._means.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the running means of `state_dict`."""
        self._means = None if state["means"] is None else torch.tensor(state["means"])

    def _note_part(self, gradient: Tensor) -> None:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        self._of_parts.append(torch.linalg.vector_norm(gradient, dtype=dtype))

    def _end_batch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._of_parts, self._of_batch, self._sizes = [], [], None, []


def _metrics(now: Timestamp, means: Tensor) -> dict[str, Any]:
    del now  # `log_lazily` passes the timestamp
    trace, squared_norm, weight = means
    return {
        f"{_NAME}/samples": trace / squared_norm,
        f"{_NAME}/trace": trace / weight,
        f"{_NAME}/squared_norm": squared_norm / weight,
    }
