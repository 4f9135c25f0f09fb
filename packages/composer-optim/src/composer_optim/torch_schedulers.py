"""Scaling the schedules of PyTorch's schedulers."""

import math
from collections import Counter
from collections.abc import Iterable
from numbers import Real
from typing import Any

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    StepLR,
)

__all__ = ["scale_pytorch_scheduler", "scale_pytorch_schedulers", "check_ratio"]


def scale_pytorch_scheduler(scheduler: LRScheduler, ssr: float) -> None:
    """Scale the length of a scheduler's schedule by `ssr`, in place, before its first step.

    Args:
        scheduler: A `StepLR`, `MultiStepLR`, `ExponentialLR`, `CosineAnnealingLR` or `CosineAnnealingWarmRestarts`.
        ssr: The scale schedule ratio, more than 0. Lengths are rounded down.

    Raises:
        TypeError: If `ssr` is not a number.
        ValueError: If `ssr` is not more than 0, a length becomes 0, or the scheduler has another type.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
        >>> scale_pytorch_scheduler(scheduler, 0.5)
        >>> scheduler.step_size
        15
    """
    scale_pytorch_schedulers([scheduler], ssr)


def scale_pytorch_schedulers(schedulers: Iterable[LRScheduler], ssr: float) -> None:
    """Scale several schedulers as `scale_pytorch_scheduler` does, or none if one cannot be scaled."""
    # All new lengths are computed first, so that an error leaves every scheduler unchanged.
    scaled = [(scheduler, scaled_lengths(scheduler, ssr)) for scheduler in schedulers]
    for scheduler, lengths in scaled:
        for name, length in lengths.items():
            setattr(scheduler, name, length)


def scaled_lengths(scheduler: LRScheduler, ssr: float) -> dict[str, Any]:
    """Return the attributes that scaling changes, with their new values; see `scale_pytorch_scheduler`."""
    check_ratio(ssr)
    if ssr == 1.0:
        return {}
    if isinstance(scheduler, StepLR):
        return {"step_size": _scale(scheduler.step_size, ssr, "StepLR.step_size")}
    if isinstance(scheduler, CosineAnnealingLR):
        return {"T_max": _scale(scheduler.T_max, ssr, "CosineAnnealingLR.T_max")}
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        # The current cycle has its own length, T_i, initially T_0.
        names = ("T_i", "T_0")
        return {name: _scale(getattr(scheduler, name), ssr, f"CosineAnnealingWarmRestarts.{name}") for name in names}
    if isinstance(scheduler, MultiStepLR):
        milestones = Counter(
            # A milestone at 0 took effect on construction; one that is scaled to 0 now never would, so it is an error.
            milestone and _scale(milestone, ssr, "MultiStepLR.milestones")
            for milestone in scheduler.milestones.elements()
        )
        return {"milestones": milestones}
    if isinstance(scheduler, ExponentialLR):
        # gamma per step is applied 1 / ssr times as often.
        return {"gamma": scheduler.gamma ** (1 / ssr)}
    raise ValueError(
        f"scale_schedule_ratio={ssr!r} cannot be applied to a {type(scheduler).__name__}: how to scale one is "
        f"known for StepLR, MultiStepLR, ExponentialLR, CosineAnnealingLR and CosineAnnealingWarmRestarts. Use "
        f"one of these or a Composer scheduler, or make this one for the scaled length and leave the ratio at 1."
    )


def check_ratio(ssr: object) -> None:
    """Raise unless a scale schedule ratio is a finite number above 0."""
    if isinstance(ssr, bool) or not isinstance(ssr, Real):
        raise TypeError(f"scale_schedule_ratio={ssr!r} is not a number. Use 0.5 for half the schedule.")
    if not 0 < float(ssr) < math.inf:
        raise ValueError(
            f"scale_schedule_ratio={ssr!r} must be more than 0 and finite. Use 0.5 for half the schedule; 1.0 changes "
            f"nothing."
        )


def _scale(length: int, ssr: float, name: str) -> int:
    """Scale a length, which must stay at least 1."""
    scaled = int(length * ssr)
    if scaled < 1:
        raise ValueError(
            f"scale_schedule_ratio={ssr!r} makes {name}={length!r} shorter than one step. Use a ratio of "
            f"more than 1/{length}."
        )
    return scaled
