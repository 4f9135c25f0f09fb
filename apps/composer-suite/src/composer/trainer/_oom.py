"""Handling of batches that do not fit into the device's memory."""

import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from composer.trainer._arguments import user_stacklevel
from composer.trainer._microbatching import size_of_batches
from composer.trainer._rank_sync import sum_over_everybody
from composer.trainer._restore import BatchUndo, StepSnapshot
from composer.trainer._scaler import forget_checks
from composer_dist.strategy import Strategy
from composer_events.state import State

_log = logging.getLogger(__name__)
_MOST_MICROBATCHES = 2**16  # for a dataloader whose batch size is unknown
_MOST_THRASHES = 2  # consecutive batches that were slow because the allocator retried


class HalveOnOom:
    """Retry a batch with microbatches of half the size, on all ranks, until it fits on every rank.

    Memory may run out on any rank, from the first forward pass to the end of the optimizer's step. Buffers, random
    states and the counters of algorithms are then restored from before the batch, weights and optimizer from before the
    step, so that the weights are the same as if the smaller size had been used from the start. The following batches
    use the smaller size, too. Gradients are averaged only after all ranks have computed theirs. Before each step the
    weights and the optimizer's state are copied, which takes about as long as the step itself.

    An optimizer that evaluates the loss itself may see smaller microbatches in the last evaluations of a step than in
    the first. Memory must not run out in AFTER_TRAIN_BATCH if a listener calls a collective there.

    Attributes:
        cumulative_alloc_retries: How often the allocator has freed its cache and retried, since the process started.
        num_consecutive_thrashes: The number of consecutive batches with such a retry on any rank; the second one halves
            the size.
        num_consecutive_non_oom_batches: The number of batches since the latest one that did not fit.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        self.cumulative_alloc_retries = 0
        self.num_consecutive_thrashes = 0
        self.num_consecutive_non_oom_batches = 0
        self._state = state
        self._attempts = Attempts(strategy)

    def gradients(self, compute: Callable[[], None]) -> None:
        """Compute gradients until it succeeds on every rank. Every rank must call this."""
        undo = BatchUndo(self._state)
        while not self._attempts.succeeds(compute, Stage.GRADIENTS):
            # The restored random states make the next attempt draw the same numbers.
            undo()
            self._begin_smaller()

    def meeting(self, *, sync: bool) -> AbstractContextManager[Any]:
        """Return the context manager of the microbatches, at the end of which the ranks exchange reports."""
        return self._attempts.meeting(sync=sync)

    def step(self, optimizer: Optimizer, prepare: Callable[[], bool] | None, take: Callable[[], None]) -> None:
        """Prepare and take a step until it succeeds on every rank. Every rank must call this."""
        undo = BatchUndo(self._state)
        while prepare is None or prepare():
            undo_step = StepSnapshot(optimizer, on_host=prepare is None)
            if self._attempts.succeeds(take, Stage.STEP, may_fail=True, thrashes=self._thrashes):
                break
            undo_step()
            undo()
            self._begin_smaller()
        self.num_consecutive_non_oom_batches += 1
        self._ease()

    def _begin_smaller(self) -> None:
        """Prepare the next attempt with smaller microbatches."""
        if not _make_smaller(self._state, "memory"):
            raise RuntimeError(
                "The device ran out of memory, on one rank at least, with microbatches of a single sample. Use a "
                "smaller model, a lower precision, shorter samples, or a strategy that spreads the model over ranks."
            )
        self.num_consecutive_non_oom_batches = 0
        if self._state.scaler is not None:
            forget_checks(self._state.scaler)
        release_memory()

    def _thrashes(self) -> bool:
        """Return whether the allocator had to retry since the last call."""
        before = self.cumulative_alloc_retries
        if self._state.device.torch_device.type == "cuda":
            self.cumulative_alloc_retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return self.cumulative_alloc_retries > before

    def _ease(self) -> None:
        """Lower the size if batches fit only after retries of the allocator, which are slow."""
        self.num_consecutive_thrashes = self.num_consecutive_thrashes + 1 if self._attempts.any_thrashes else 0
        if self.num_consecutive_thrashes >= _MOST_THRASHES:
            self.num_consecutive_thrashes = 0
            _make_smaller(self._state, "time, since memory is short")


def halve(size: int | float) -> int | float | None:
    """Return the next smaller size of a microbatch, or `None` at one sample."""
    return None if size <= 1 else max(int(size / 2), 1)


def release_memory() -> None:
    """Release the allocator's cache, for other ranks and libraries on the same device."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _make_smaller(state: State, lack: str) -> bool:
    """Lower the size of microbatches, or raise their number, and return whether that was possible."""
    if state.grad_accum is not None:
        # The limit is the same on every rank. A batch with fewer samples is split into single samples.
        most = size_of_batches(state.dataloader) or _MOST_MICROBATCHES
        name, old, new = "grad_accum", state.grad_accum, min(2 * state.grad_accum, most)
        if old >= most:
            return False
        state.grad_accum = new
        change = f"Train microbatch size will be decreased by grad_accum from {old} to {new}."
    else:
        old = state.device_train_microbatch_size
        assert old is not None, "the Trainer sets it with the dataloader"
        name, new = "device_train_microbatch_size", halve(old)
        if new is None:
            return False
        state.device_train_microbatch_size = new
        change = f"Train microbatch size will be decreased from {old} to {new}."
    warnings.warn(f"A batch ran out of {lack}. {change}", RuntimeWarning, stacklevel=user_stacklevel())
    _log.info("%s is %s now.", name, new)
    return True


# Messages of out-of-memory errors that are not a `torch.OutOfMemoryError`.
_OTHER_NAMES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_CUDNN = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"  # its error when no memory is left for a workspace


class Stage(Enum):
    """Stage of an attempt; GRADIENTS is inside STEP for an optimizer that evaluates the loss itself."""

    GRADIENTS = "gradients"
    STEP = "step"


class _OutOfMemoryElsewhere(Exception):
    """Another rank has run out of memory in a stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage


class Attempts:
    """Attempts that fail on all ranks if one of them runs out of memory.

    All ranks exchange small reports in the same order: one before each collective of the strategy (see
    `Strategy.attempt`), and one at the end of each attempt. A rank that runs out of memory sends its report at once and
    starts the next attempt. The others read it with their next report, before the collective, and follow. So every rank
    sends the same number of reports, wherever and on whichever rank memory runs out.

    Args:
        strategy: Calls the report before each of its collectives.
        kind: The class of the error raised for other CUDA errors.

    Attributes:
        any_thrashes: Whether any rank reported allocator retries at the end of the latest attempt.
    """

    def __init__(self, strategy: Strategy, kind: type[Exception] = RuntimeError) -> None:
        self.any_thrashes = False
        self._strategy = strategy
        self._kind = kind
        self._may_fail = False

    def succeeds(
        self, run: Callable[[], object], stage: Stage, *, may_fail: bool = False, thrashes: Callable[[], bool] = bool
    ) -> bool:
        """Run an attempt, and return whether it succeeded on every rank. Every rank must call this.

        Args:
            run: The attempt. It may fail inside `meeting`.
            stage: The stage that it belongs to.
            may_fail: Whether it may also fail before `meeting`.
            thrashes: Called at the end; returns whether this rank's allocator had to retry.

        Raises:
            Exception: Any error of `run` other than a lack of memory.
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
    def meeting(self, *, sync: bool) -> Generator[None]:
        """Return the context manager of an attempt's microbatches, at the end of which the ranks exchange reports."""
        with self._strategy.attempt(self._report, sync=sync):
            self._may_fail = True
            yield
            self._may_fail = False  # from here on the others may be waiting for this rank's gradients
        self._may_fail = True  # an optimizer with a closure has its step still ahead

    def _report(self, *, fails_in: Stage | None = None, thrashes: bool = False) -> None:
        """Exchange reports; raise if another rank has failed in this stage or in an enclosing one."""
        counts = sum_over_everybody([*(int(fails_in is stage) for stage in Stage), int(thrashes)])
        *num_failing, num_thrashing = counts
        self.any_thrashes = num_thrashing > 0
        # The enclosing stage first: repeating it repeats the inner one, too.
        for stage, number in reversed(list(zip(Stage, num_failing, strict=True))):
            if fails_in is stage:
                return
            if number:
                raise _OutOfMemoryElsewhere(stage)


def is_out_of_memory(error: Exception, kind: type[Exception] = RuntimeError) -> bool:
    """Return whether an error is a lack of device memory.

    Raises:
        Exception: Of class `kind`, for any other CUDA error, after which no attempt can be repeated.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error)
    if not isinstance(error, RuntimeError):
        return False
    if _CUDNN in message:
        _log.warning("This error is treated as a lack of memory, its usual cause: %s", message)
        return True
    if any(name in message for name in _OTHER_NAMES):
        return True
    # Raised as another error, because the CUDA context may be unusable.
    if "cuda" in message.lower() or "c10" in message:
        raise kind(
            f"Encountered non-addressable cuda error while using auto microbatching: {message} If it is a lack of "
            "memory, give the microbatch size as a number."
        ) from error
    return False
