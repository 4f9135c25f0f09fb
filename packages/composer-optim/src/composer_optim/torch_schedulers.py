"""Scale the schedules of PyTorch's own schedulers."""

from collections import Counter

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    StepLR,
)


def scale_pytorch_scheduler(scheduler: LRScheduler, ssr: float) -> None:
    """Make a scheduler's schedule `ssr` times as long, in place, before it has been stepped.

    Args:
        scheduler: A `StepLR`, `MultiStepLR`, `ExponentialLR`, `CosineAnnealingLR` or `CosineAnnealingWarmRestarts`.
        ssr: The scale schedule ratio; more than 0. Lengths are rounded down.

    Raises:
        ValueError: If `ssr` is not more than 0, a length becomes 0, or nothing is known of the scheduler's kind.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
        >>> scale_pytorch_scheduler(scheduler, 0.5)
        >>> scheduler.step_size
        15
    """
    if not ssr > 0:
        raise ValueError(f"scale_schedule_ratio={ssr!r} must be more than 0. Use 0.5 for half the schedule.")
    if ssr == 1.0:
        return
    if isinstance(scheduler, StepLR):
        scheduler.step_size = _scale(scheduler.step_size, ssr, "StepLR.step_size")
    elif isinstance(scheduler, CosineAnnealingLR):
        scheduler.T_max = _scale(scheduler.T_max, ssr, "CosineAnnealingLR.T_max")
    elif isinstance(scheduler, CosineAnnealingWarmRestarts):
        # The running cycle has its own length, T_i, which began as T_0.
        scheduler.T_i = _scale(scheduler.T_i, ssr, "CosineAnnealingWarmRestarts.T_i")
        scheduler.T_0 = _scale(scheduler.T_0, ssr, "CosineAnnealingWarmRestarts.T_0")
    elif isinstance(scheduler, MultiStepLR):
        scheduler.milestones = Counter(
            # One at 0 has taken effect when the scheduler was made; one that comes to 0 now would never do so.
            milestone and _scale(milestone, ssr, "MultiStepLR.milestones")
            for milestone in scheduler.milestones.elements()
        )
    elif isinstance(scheduler, ExponentialLR):
        scheduler.gamma = scheduler.gamma ** (1 / ssr)
    else:
        raise ValueError(
            f"scale_schedule_ratio={ssr!r} cannot be applied to a {type(scheduler).__name__}: how to scale one is "
            f"known for StepLR, MultiStepLR, ExponentialLR, CosineAnnealingLR and CosineAnnealingWarmRestarts. Use "
            f"one of these or a Composer scheduler, or make this one for the scaled length and leave the ratio at 1."
        )


def _scale(length: int, ssr: float, name: str) -> int:
    """Scale a length that has to stay one."""
    scaled = int(length * ssr)
    if scaled < 1:
        raise ValueError(
            f"scale_schedule_ratio={ssr!r} makes {name}={length!r} shorter than one step. Use a ratio of "
            f"more than 1/{length}."
        )
    return scaled
