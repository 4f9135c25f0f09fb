"""Running out of memory on one rank, known to all ranks before they wait for each other."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from composer.trainer._ranks import sum_over_everybody
from composer_dist.strategy import Strategy

__all__ = ["Attempts", "Stage", "is_out_of_memory"]

_log = logging.getLogger(__name__)

# What a lack of memory is called where it comes as no `torch.OutOfMemoryError`.
_OTHER_NAMES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_CUDNN = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"  # its way to say that it got no workspace


class Stage(Enum):
    """What a rank may fail in: one lies in the other where an optimizer evaluates the loss itself."""

    GRADIENTS = "gradients"
    STEP = "step"


class _OutOfMemoryElsewhere(Exception):
    """Another rank gives up the attempt at a stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage


class Attempts:
    """Makes attempts that fail on all ranks if one of them runs out of memory.

    All ranks exchange tiny reports in the same order: one wherever the strategy is about to let them meet (see
    `Strategy.attempt`), and one at the end of each attempt. A rank that runs out of memory gives its report at once and
    goes on to the next attempt. The others learn of it in their very next report, before they meet, and follow. So
    every rank gives as many reports, whichever of them fails and wherever it does.

    Args:
        strategy: Knows where the ranks meet.
        kind: The class of the error for what may be a lack of memory, or not.

    Attributes:
        any_thrashes: Whether any rank said so at the end of the latest attempt.
    """

    def __init__(self, strategy: Strategy, kind: type[Exception] = RuntimeError) -> None:
        self.any_thrashes = False
        self._strategy = strategy
        self._kind = kind
        self._may_fail = False

    def succeeds(
        self, run: Callable[[], object], stage: Stage, *, may_fail: bool = False, thrashes: Callable[[], bool] = bool
    ) -> bool:
        """Run an attempt, and say whether it went well on every rank. Every rank must call this.

        Args:
            run: It may fail where `meeting` says so.
            stage: What it does.
            may_fail: Whether it may fail from its begin.
            thrashes: Says at its end whether this rank's device is so short of memory that it is slow.

        Raises:
            Exception: What `run` raised, if that was anything else than a lack of memory.
        """
        self._may_fail = may_fail
        try:
            run()
            self._report(thrashes=thrashes())
        except _OutOfMemoryElsewhere as elsewhere:
            if elsewhere.stage is not stage:
                raise
            return False
        except Exception as error:
            if not self._may_fail or not is_out_of_memory(error, self._kind):
                raise
        else:
            return True
        self._report(fails_in=stage)  # not in the handler, whose error keeps the attempt's tensors in memory
        return False

    @contextmanager
    def meeting(self, *, sync: bool) -> Iterator[None]:
        """Return the context of an attempt's microbatches, at whose end the ranks meet."""
        with self._strategy.attempt(self._report, sync=sync):
            self._may_fail = True
            yield
            self._may_fail = False  # from here on the others may be waiting for this rank's gradients
        self._may_fail = True

    def _report(self, *, fails_in: Stage | None = None, thrashes: bool = False) -> None:
        """Tell the other ranks, and raise if one of them fails while this one does not, or in a stage around it."""
        counts = sum_over_everybody([*(int(fails_in is stage) for stage in Stage), int(thrashes)])
        *num_failing, num_thrashing = counts
        self.any_thrashes = num_thrashing > 0
        for stage, number in reversed(list(zip(Stage, num_failing, strict=True))):
            if fails_in is stage:
                return
            if number:
                raise _OutOfMemoryElsewhere(stage)


def is_out_of_memory(error: Exception, kind: type[Exception] = RuntimeError) -> bool:
    """Say whether an error is a lack of the device's memory.

    Raises:
        Exception: Of this `kind`, if it is another error of CUDA's, after which nothing can be repeated.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error)
    if not isinstance(error, RuntimeError):
        return False
    if _CUDNN in message:
        _log.warning("Taken for a lack of memory, as which it comes at times: %s", message)
        return True
    if any(name in message for name in _OTHER_NAMES):
        return True
    if "cuda" in message.lower() or "c10" in message:
        raise kind(
            f"Encountered non-addressable cuda error while using auto microbatching: {message} If it is a lack of "
            "memory, give the microbatch size as a number."
        ) from error
    return False
