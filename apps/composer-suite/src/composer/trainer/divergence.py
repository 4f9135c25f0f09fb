"""Policies for batches that would harm the weights: non-finite gradients, or a loss that jumps."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["Divergence", "DivergenceError", "OnDivergence"]

Action = Literal["raise", "skip", "rollback"]
SpikeAction = Literal["log", "skip", "rollback", "raise"]


@dataclass(frozen=True, slots=True)
class OnDivergence:
    """Policy for batches whose gradients are not finite, and for a loss that jumps.

    Such a batch is detected before the optimizer steps, on all ranks alike, so weights, optimizer state and the model's
    buffers (such as running means) keep their values. A skipped batch still counts in the timestamp. Gradients are
    checked as the optimizer sees them, after algorithms such as clipping; of a sharded gradient, the norm of each
    rank's shard must be finite, too.

    A non-finite loss with finite gradients is harmless: a microbatch whose labels are all ignored has the loss 0/0 and
    gradients of 0. It is logged and excluded from averages.

    Weights that become non-finite in the step itself, such as by a division by 0, end the run for every `action`. They
    are found by the next batch, before a checkpoint is saved, and at the end.

    On a GPU the host reads the result two batches later, without synchronization, and before weights are saved or
    evaluated. With a fused optimizer (`AdamW(..., fused=True)`) or a `GradScaler`, the device skips the steps until
    then, so the error leaves the weights from before the batch. Any other optimizer has taken those steps, and its
    weights are not finite either; `'rollback'` undoes them, and `'skip'` synchronizes with the device before each step,
    as does `'rollback'` with algorithms, such as `EMA`, that may average the weights.

    | `action` | Effect |
    |---|---|
    | `'raise'` | a `DivergenceError` |
    | `'skip'` | no step with this batch; training continues with the next one |
    | `'rollback'` | weights, buffers and optimizer state return to the latest copy, which is taken in memory every \
    `rollback_batches` batches; training continues with the next batch |

    Args:
        action: The action on gradients that are not finite.
        spike_factor: A loss of more than this many times the median of the latest ones is a spike. `None` disables
            the check, which reads the loss of every batch, synchronizes with the device and averages over the ranks.
        on_spike: The action on a spike: as `action`, or `'log'` to log it and take the step.
        rollback_batches: The largest number of batches that a rollback undoes. The copy needs as much memory on the
            device as the weights, the buffers and the optimizer state.
        max_in_a_row: After this many batches in a row without a step, a `DivergenceError` is raised for every
            `action`.

    Raises:
        ValueError: If an action is unknown, or a number is too small.

    Example:
        >>> OnDivergence("skip", spike_factor=1000, on_spike="rollback").max_in_a_row
        10
    """

    action: Action = "raise"
    spike_factor: float | None = None
    on_spike: SpikeAction = "log"
    rollback_batches: int = 100
    max_in_a_row: int = 10

    def __post_init__(self) -> None:
        for name, value, accepted in (
            ("action", self.action, get_args(Action)),
            ("on_spike", self.on_spike, get_args(SpikeAction)),
        ):
            if value not in accepted:
                raise ValueError(f"{name}={value!r} is not known. Choose one of {', '.join(map(repr, accepted))}.")
        if self.spike_factor is not None and not self.spike_factor > 1:
            raise ValueError(
                f"spike_factor={self.spike_factor!r} must be a number greater than 1, such as 1000: a spike is a loss "
                "that many times as large as usual. Leave it out to disable the check."
            )
        for name, count in (("rollback_batches", self.rollback_batches), ("max_in_a_row", self.max_in_a_row)):
            if count < 1:
                raise ValueError(f"{name}={count!r} must be a number of batches, 1 or more.")

    @property
    def rolls_back(self) -> bool:
        """Return whether any of the actions is a rollback."""
        return self.action == "rollback" or (self.spike_factor is not None and self.on_spike == "rollback")


@dataclass(frozen=True, slots=True)
class Divergence:
    """A batch that would have harmed the weights, and the action taken.

    Attributes:
        batch: The number of batches trained on before it.
        epoch: The epoch of the batch.
        loss: The loss of the batch, or NaN if it was not read from the device.
        is_spike: Whether the loss jumped; otherwise a gradient or weight was not finite.
        action: The action taken.
    """

    batch: int
    epoch: int
    loss: float
    is_spike: bool
    action: str


class DivergenceError(RuntimeError):
    """Error for a gradient that is not finite, or a loss that jumps. The weights are those before the batch.

    If a step itself has made weights non-finite, as the message then states, they are those after the step.

    Attributes:
        divergence: Describes the batch.
    """

    def __init__(self, message: str, divergence: Divergence) -> None:
        super().__init__(message)
        self.divergence = divergence


def to_policy(given: Any, *, is_deepspeed: bool = False) -> OnDivergence | None:
    """Convert the argument `on_divergence` to a policy; `None` disables all checks."""
    policy = OnDivergence(given) if given in ("raise", "skip", "rollback") else given
    if policy is None:
        return None
    if not isinstance(policy, OnDivergence):
        kind = ValueError if isinstance(given, str) else TypeError
        raise kind(
            f"on_divergence={given!r} is not a policy. Give 'raise', 'skip', 'rollback', an OnDivergence(...) for "
            "more options, or None to disable the check."
        )
    if is_deepspeed and (policy.action != "raise" or policy.on_spike not in ("raise", "log")):
        raise ValueError(
            f"on_divergence={given!r} cannot be combined with deepspeed_config: DeepSpeed's engine keeps gradients and "
            "state internal, so that a step can be neither skipped nor undone. Give 'raise' or None."
        )
    return policy
