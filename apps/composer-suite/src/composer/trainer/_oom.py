"""What is done about a batch that does not fit into the device's memory."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from composer.trainer._arguments import level_of_user
from composer.trainer._rank_sync import sum_over_everybody
from composer.trainer._restore import BatchUndo, StepUndo
from composer.trainer._scaler import forget_checks
from composer_dist.strategy import Strategy
from composer_events.state import State

__all__ = ["AsGiven", "Fitting", "UntilItFits", "halve", "release_memory", "Attempts", "Stage", "is_out_of_memory"]

_log = logging.getLogger(__name__)
_NOTHING = nullcontext()  # reentrant and without state, so one serves every batch
_MOST_THRASHES = 2  # batches in a row that were slow for a lack of memory


class Fitting(Protocol):
    """What `BatchTrainer` asks around the gradients and the step of each batch."""

    def gradients(self, compute: Callable[[], None]) -> None:
        """Compute gradients, perhaps several times."""
        ...

    def meeting(self, *, sync: bool) -> AbstractContextManager[Any]:
        """Return the context of the microbatches, at whose end the ranks meet."""
        ...

    def step(self, optimizer: Optimizer, prepare: Callable[[], bool] | None, take: Callable[[], None]) -> None:
        """Prepare an optimizer's step and take it if it is to be taken, perhaps several times."""
        ...


class AsGiven:
    """Cuts batches as the user said; one that does not fit is an error that names the size."""

    def __init__(self, state: State) -> None:
        self._state = state

    def gradients(self, compute: Callable[[], None]) -> None:
        """Compute gradients."""
        try:
            compute()
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"with device_train_microbatch_size={self._state.device_train_microbatch_size}; give a smaller one, "
                "or 'auto' to have it found"
            )
            raise

    def meeting(self, *, sync: bool) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return _NOTHING

    def step(self, optimizer: Optimizer, prepare: Callable[[], bool] | None, take: Callable[[], None]) -> None:
        """Prepare a step and take it."""
        if prepare is None or prepare():
            take()


class UntilItFits:
    """Repeats a batch with microbatches of half the size, on all ranks alike, until it fits everywhere.

    Memory may run out on any rank, between the first forward pass and the end of the optimizer's step. Buffers, random
    draws and what algorithms count are then made what they were before the batch, and weights and optimizer as they
    were before the step, so that the weights come out as if the size had been the smaller one from the start. It stays
    so for the batches that follow. Gradients are averaged only when all ranks have theirs, and before each step the
    weights and the optimizer's state are copied, which takes about as long as the step itself.

    An optimizer that evaluates the loss itself may see the last evaluations of a step with smaller microbatches than
    the first. It must not run out of memory in AFTER_TRAIN_BATCH where a listener lets the ranks meet.

    Args:
        state: Its size of microbatches, or their number, is changed.
        strategy: How the ranks meet.

    Attributes:
        cumulative_alloc_retries: How often the device's memory had to be tidied up for room, since the process began.
        num_consecutive_thrashes: In how many batches in a row it had to be on any rank; after the second one, the
            size is halved.
        num_consecutive_non_oom_batches: How many batches have fitted since the latest that did not.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        self.cumulative_alloc_retries = 0
        self.num_consecutive_thrashes = 0
        self.num_consecutive_non_oom_batches = 0
        self._state = state
        self._attempts = Attempts(strategy)

    def gradients(self, compute: Callable[[], None]) -> None:
        """Compute gradients until it succeeds on every rank. Every rank must call this.

        Raises:
            RuntimeError: If microbatches cannot be smaller.
        """
        undo = BatchUndo(self._state)
        while not self._attempts.succeeds(compute, Stage.GRADIENTS):
            undo()
            self._begin_smaller()

    def meeting(self, *, sync: bool) -> AbstractContextManager[Any]:
        """Return the context of the microbatches, at whose end the ranks meet."""
        return self._attempts.meeting(sync=sync)

    def step(self, optimizer: Optimizer, prepare: Callable[[], bool] | None, take: Callable[[], None]) -> None:
        """Prepare a step and take it until it succeeds on every rank. Every rank must call this.

        Raises:
            RuntimeError: If microbatches cannot be smaller.
        """
        undo = BatchUndo(self._state)
        while prepare is None or prepare():
            undo_step = StepUndo(optimizer, on_host=prepare is None)
            if self._attempts.succeeds(take, Stage.STEP, may_fail=True, thrashes=self._thrashes):
                break
            undo_step()
            undo()
            self._begin_smaller()
        self.num_consecutive_non_oom_batches += 1
        self._ease()

    def _begin_smaller(self) -> None:
        """Let the next attempt be one with smaller microbatches."""
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
        """Say whether the device had to tidy up its memory for room, since the last time this was asked."""
        before = self.cumulative_alloc_retries
        if self._state.device.torch_device.type == "cuda":
            self.cumulative_alloc_retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return self.cumulative_alloc_retries > before

    def _ease(self) -> None:
        """Lower the size also where batches fit, but only just."""
        self.num_consecutive_thrashes = self.num_consecutive_thrashes + 1 if self._attempts.any_thrashes else 0
        if self.num_consecutive_thrashes >= _MOST_THRASHES:
            self.num_consecutive_thrashes = 0
            _make_smaller(self._state, "time, since memory is short")


def halve(size: int | float) -> int | float | None:
    """Return the next smaller size of a microbatch, or `None` if there is none."""
    return None if size <= 1 else max(int(size / 2), 1)


def release_memory() -> None:
    """Give what the device keeps for later use back to it, for the ranks and libraries that share it."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _make_smaller(state: State, lack: str) -> bool:
    """Lower the size of microbatches, or raise their number, and say whether that could be."""
    if state.grad_accum is not None:
        name, old, new = "grad_accum", state.grad_accum, _more(state)
        if new is None:
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
    warnings.warn(f"A batch ran out of {lack}. {change}", RuntimeWarning, stacklevel=level_of_user())
    _log.info("%s is %s now.", name, new)
    return True


def _more(state: State) -> int | None:
    """Return the next larger number of microbatches, alike on every rank, or `None` if each is one sample."""
    assert state.grad_accum is not None
    most = getattr(state.dataloader, "batch_size", None) or math.inf  # a batch cut finer than it can be is in samples
    return None if state.grad_accum >= most else min(2 * state.grad_accum, int(most))


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
