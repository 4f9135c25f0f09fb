"""What a run does about a batch that would ruin the weights: a gradient that is not finite, or a loss that jumps."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["Divergence", "DivergenceError", "OnDivergence"]

Action = Literal["raise", "skip", "rollback"]
SpikeAction = Literal["log", "skip", "rollback", "raise"]


@dataclass(frozen=True, slots=True)
class OnDivergence:
    """What to do about a batch whose gradients are not finite, and about a loss that jumps.

    The batch is found before the optimizer steps, on all ranks alike, and the weights, the optimizer's state and the
    model's buffers (such as running means) stay those before it. Time goes on with a batch that was skipped. The
    gradients count as the optimizer sees them, after algorithms such as clipping; of a sharded gradient, the norm of
    each rank's part must be finite too.

    A loss that is not finite beside finite gradients does no harm: that of a microbatch whose labels are all ignored is
    0/0, and its gradients are 0. It is logged and left out of averages.

    Weights that the step itself makes not finite, such as by dividing by 0, end the run whatever `action` says: they
    are found by the next batch, before they are saved, and at the end.

    On a GPU nobody waits for the answer where the optimizer has a fused kernel (`AdamW(..., fused=True)`) or a
    `GradScaler` looks after it: the device itself leaves the step out, and the host learns of it two batches later. A
    step of any other optimizer could be taken back only with a copy of all weights, so before each the host waits until
    the gradients are there.

    | `action` | what follows |
    |---|---|
    | `'raise'` | a `DivergenceError` |
    | `'skip'` | no step with this batch; training goes on with the next one |
    | `'rollback'` | weights, buffers and the optimizer's state go back to those of the latest copy, which is taken in \
memory every `rollback_batches` batches; training goes on with the next batch |

    Args:
        action: What to do about what is not finite.
        spike_factor: A loss of more than so many times the median of the latest ones is a spike. `None` to let losses
            be. To look for spikes is to read the loss of every batch, for which an accelerator must be waited for, and
            to average it over the ranks.
        on_spike: What to do about a spike: as `action`, or `'log'` it and step all the same.
        rollback_batches: How far back a rollback goes at most. The copy takes as much memory, on the device, as the
            weights, the buffers and the optimizer's state.
        max_in_a_row: After so many batches in a row without a step, a `DivergenceError` is raised whatever `action`
            says.

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
                "that many times as large as usual. Leave it out to let losses be."
            )
        for name, count in (("rollback_batches", self.rollback_batches), ("max_in_a_row", self.max_in_a_row)):
            if count < 1:
                raise ValueError(f"{name}={count!r} must be a number of batches, 1 or more.")

    @property
    def rolls_back(self) -> bool:
        """Whether anything at all is answered with a rollback."""
        return self.action == "rollback" or (self.spike_factor is not None and self.on_spike == "rollback")


@dataclass(frozen=True, slots=True)
class Divergence:
    """A batch that would have ruined the run, and what was done about it.

    Attributes:
        batch: How many batches had been trained on before it.
        epoch: The epoch it belongs to.
        loss: Its loss, or NaN where nobody waited for it.
        is_spike: Whether the loss jumped; otherwise something was not finite.
        action: What was done.
    """

    batch: int
    epoch: int
    loss: float
    is_spike: bool
    action: str


class DivergenceError(RuntimeError):
    """A gradient is not finite, or the loss jumped. The weights are those before the batch.

    Where the message says that a step has ruined the weights themselves, they are as it left them.

    Attributes:
        divergence: The batch.
    """

    def __init__(self, message: str, divergence: Divergence) -> None:
        super().__init__(message)
        self.divergence = divergence


def to_policy(given: Any, *, is_deepspeed: bool = False) -> OnDivergence | None:
    """Return what the user gave as a policy; `None` looks at nothing.

    Raises:
        TypeError: If it is none.
        ValueError: If it is a word for no action, or DeepSpeed cannot do what it says.
    """
    policy = OnDivergence(given) if given in ("raise", "skip", "rollback") else given
    if policy is None:
        return None
    if not isinstance(policy, OnDivergence):
        kind = ValueError if isinstance(given, str) else TypeError
        raise kind(
            f"on_divergence={given!r} says nothing that can be done about a divergence. Give 'raise', 'skip', "
            "'rollback', an OnDivergence(...) for more, or None to train on whatever comes."
        )
    if is_deepspeed and (policy.action != "raise" or policy.on_spike not in ("raise", "log")):
        raise ValueError(
            f"on_divergence={given!r} does not go with deepspeed_config: DeepSpeed's engine keeps gradients and "
            "state to itself, so that a step can be neither left out nor undone. Give 'raise' or None."
        )
    return policy
