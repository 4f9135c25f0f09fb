"""Sizes of microbatches: from the arguments of the Trainer, and smaller ones where memory runs out."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from composer.trainer._arguments import user_stacklevel
from composer.trainer._rank_sync import sum_over_everybody
from composer.trainer._restore import BatchUndo, StepSnapshot
from composer.trainer._scaler import forget_checks
from composer_dist.devices import Device
from composer_dist.strategy import Strategy
from composer_events.batches import ensure_tuple
from composer_events.data_spec import DataSpec, default_split_batch, size_of_batches
from composer_events.state import State
from composer_models.targets import IGNORED

_AUTO = "auto"
_COUNTED = (
    "train_dataloader=DataSpec(dataloader, get_num_tokens_in_batch=count), where count(batch) returns "
    "{'total': ..., 'loss_generating': ...}."
)


@dataclass(frozen=True, slots=True)
class Microbatching:
    """Number of samples per forward pass.

    Attributes:
        size: Samples per microbatch; `None` for the dataloader's batch size.
        count: Microbatches per batch, instead of a size.
        is_auto: Whether size or count is an initial value, adapted when the device runs out of memory.
    """

    size: int | float | None = None
    count: int | None = None
    is_auto: bool = False

    @classmethod
    def of(cls, size: Any, grad_accum: Any, device: Device, *, profiler: Any = None) -> Microbatching:
        """Create one from the arguments `device_train_microbatch_size` and `grad_accum`."""
        if grad_accum is not None:
            _check_grad_accum(grad_accum)
            # Scripts may pass 1, the default of earlier releases, together with a size.
            if size is not None and grad_accum != 1:
                raise ValueError(
                    "Cannot use both device_train_microbatch_size and grad_accum: they are "
                    f"device_train_microbatch_size={size!r} and grad_accum={grad_accum!r}. Give the first alone."
                )
        is_count = size is None and grad_accum is not None
        if (grad_accum if is_count else size) == _AUTO:
            _check_auto("grad_accum" if is_count else "device_train_microbatch_size", device, profiler)
            return cls(count=1 if is_count else None, is_auto=True)
        if is_count:
            return cls(count=grad_accum)
        if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0):
            raise ValueError(_not_positive(size))
        return cls(size=size)

    def resolve(self, data_spec: DataSpec) -> int | float | None:
        """Return the number of samples per microbatch, or `None` if it depends on the batch."""
        if self.count is not None:
            return None
        size = _batch_size(data_spec, is_auto=self.is_auto) if self.size is None else self.size
        # A size below one sample is meaningful only for a custom `split_batch`.
        kinds = int if data_spec.split_batch is default_split_batch else (int, float)
        if isinstance(size, bool) or not isinstance(size, kinds) or not size > 0:
            raise ValueError(_not_positive(size))
        for holder in (data_spec, data_spec.dataloader) if self.is_auto else ():
            parallel: Any = getattr(holder, "seq_parallel_world_size", 1)
            if parallel != 1:
                raise ValueError(
                    "device_train_microbatch_size='auto' cannot be combined with the dataloader's "
                    f"seq_parallel_world_size={parallel!r}, where each sample is spread over ranks. Give the "
                    "microbatch size as a number."
                )
        return size

    def of_one_size(self, batch_size: Any) -> Any:
        """Return the microbatch size for batches of a fixed size, which DeepSpeed needs in advance."""
        if self.is_auto:
            return _AUTO
        if self.count is None or not isinstance(batch_size, int):
            return self.size
        return math.ceil(batch_size / self.count)


def size_for(batch: Any, data_spec: DataSpec, state: State) -> int | float:
    """Return the microbatch size for this batch, and store it on the state if it depends on the batch.

    With a number of microbatches, all are of equal size except the last, as in `torch.chunk`.
    """
    if state.grad_accum is not None:
        num_samples = data_spec.get_num_samples_in_batch(batch)
        if num_samples < state.grad_accum:
            warnings.warn(
                f"Cannot split batch of length {num_samples} into grad_accum={state.grad_accum} microbatches, so each "
                "of its samples is one.",
                stacklevel=user_stacklevel(),
            )
        state.device_train_microbatch_size = max(math.ceil(num_samples / state.grad_accum), 1)
    assert state.device_train_microbatch_size is not None, "the Trainer sets it with the dataloader"
    return state.device_train_microbatch_size


def check_token_weights(num_tokens: int | float, microbatches: Sequence[Any], data_spec: DataSpec) -> None:
    """Reject token weights if no tokens are counted, and warn if they would count padding."""
    # A custom function may count only the tokens that enter the loss.
    if not data_spec.counts_tokens_by_default:
        return
    if not num_tokens:
        raise ValueError(
            "accumulate_train_batch_on_tokens=True, and no tokens are counted in a batch: it has no input_ids, and the "
            f"dataset no max_seq_len. Count them: {_COUNTED}"
        )
    if any(map(_has_ignored_labels, microbatches)):
        warnings.warn(
            f"accumulate_train_batch_on_tokens=True counts all tokens of a microbatch, also those with the label "
            f"{IGNORED}, which enter no loss. Count them separately: {_COUNTED}",
            stacklevel=user_stacklevel(),
        )


def _has_ignored_labels(batch: Any) -> bool:
    parts = ensure_tuple(batch) if isinstance(batch, (Mapping, list, tuple)) else ()
    labels = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype in (torch.int32, torch.int64)]
    # Sparse and nested tensors do not support the comparison.
    return any(each.layout is torch.strided and not each.is_nested and bool((each == IGNORED).any()) for each in labels)


def _not_positive(size: Any) -> str:
    return (
        f"device_train_microbatch_size must be an int or ``'auto'``: device_train_microbatch_size={size!r} must be a "
        "whole number of samples greater than 0. Leave it out to train on whole batches."
    )


def _check_grad_accum(count: Any) -> None:
    if count != _AUTO and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(
            f"grad_accum={count!r} must be a whole number of microbatches from 1, or 'auto'. Better give "
            "device_train_microbatch_size, the number of samples in each."
        )
    newer = "'auto'" if count == _AUTO else f"the batch size of a rank divided by {count}"
    warnings.warn(
        f"grad_accum={count!r} is an older spelling. Write device_train_microbatch_size=..., here {newer}. A "
        "DataSpec's split_batch gets a number of samples, not of microbatches. It will be removed in release 1.0.",
        DeprecationWarning,
        stacklevel=user_stacklevel(),
    )


REPORT_OUT_OF_MEMORY = ("gpu", "simulated")  # names of devices; the second is SimulatedAccelerator


def _check_auto(name: str, device: Device, profiler: Any) -> None:
    if profiler is not None:
        raise ValueError(
            f"{name}='auto' is not compatible with the profiler, which would record attempts that fail. Find the "
            "size without profiler=..., then give it as a number."
        )
    if device.name not in REPORT_OUT_OF_MEMORY:
        raise ValueError(
            f"Can only use adaptive {name} on GPU, and device is {device.name!r}: other devices do not report that "
            f"they are out of memory. Give {name} as a number."
        )
    warnings.warn(
        f"{name}='auto' is experimental: it may run into CUDA errors that cannot be distinguished from a lack of "
        "memory. If training fails with one, give a number.",
        UserWarning,
        stacklevel=user_stacklevel(),
    )


def _batch_size(data_spec: DataSpec, *, is_auto: bool) -> Any:
    loader = data_spec.dataloader
    if is_auto and not hasattr(loader, "batch_size"):
        raise AttributeError(
            f"device_train_microbatch_size='auto' begins with the `batch_size` of train_dataloader, and "
            f"{type(loader).__name__} has no such attribute. Give the number of samples."
        )
    sampler, size = getattr(loader, "batch_sampler", None), size_of_batches(loader)
    if size is None:
        nor = "" if sampler is None else f", nor has its batch_sampler, a {type(sampler).__name__}"
        raise ValueError(
            "`device_train_microbatch_size` must be set when train_dataloader does not have a `batch_size` "
            f"attribute, and {type(loader).__name__} has none{nor}. Give the number of samples."
        )
    return size


_log = logging.getLogger(__name__)

TResult = TypeVar("TResult")
_MOST_MICROBATCHES = 2**16  # for a dataloader whose batch size is unknown
_MOST_THRASHES = 2  # consecutive batches that were slow because the allocator retried


class _OutOfMemoryElsewhere(Exception):
    """Another rank has run out of memory."""


class Attempts:
    """Attempts that fail on all ranks if one of them runs out of memory.

    All ranks exchange small reports in the same order: one before each collective of the strategy (see
    `Strategy.attempt`), and one at the end of each part of an attempt, by `agree`. A rank that runs out of memory sends
    its report at once and starts the next attempt. The others read it with their next report, before the collective,
    and follow. So every rank sends the same number of reports, wherever and on whichever rank memory runs out.

    Attributes:
        may_fail: Whether a lack of memory on this rank repeats the attempt now. If not, others may be in a collective.
        any_thrashes: Whether any rank reported allocator retries in the latest report.
    """

    def __init__(self, strategy: Strategy, kind: type[Exception] = RuntimeError) -> None:
        self.may_fail = False
        self.any_thrashes = False
        self._strategy = strategy
        self._kind = kind

    def result(self, attempt: Callable[[], TResult]) -> TResult | None:
        """Return the result of an attempt, or `None` if memory ran out on any rank. Every rank must call this."""
        self.may_fail = False
        try:
            return attempt()
        except _OutOfMemoryElsewhere:
            return None
        except Exception as error:
            if not self.may_fail or not is_out_of_memory(error, self._kind):
                raise
        self._report(fails=True)  # not in the handler, whose error keeps the attempt's tensors in memory
        return None

    @contextmanager
    def meeting(self, *, sync: bool) -> Generator[None]:
        """Return the context manager of an attempt's microbatches, at the end of which the ranks exchange reports."""
        with self._strategy.attempt(self._report, sync=sync):
            self.may_fail = True
            yield
            self.may_fail = False  # from here on the others may be waiting for this rank's gradients
        self.may_fail = True

    def agree(self, *, thrashes: bool = False) -> None:
        """Fail this part of the attempt on all ranks if it failed on one. Every rank must call this at its end."""
        self._report(thrashes=thrashes)
        self.may_fail = False

    def _report(self, *, fails: bool = False, thrashes: bool = False) -> None:
        num_failing, num_thrashing = sum_over_everybody([int(fails), int(thrashes)])
        self.any_thrashes = num_thrashing > 0
        if num_failing and not fails:
            raise _OutOfMemoryElsewhere


class HalveOnOom(Attempts):
    """Retry a batch with microbatches of half the size, on all ranks, until it fits on every rank.

    Memory may run out on any rank, from the first forward pass to the end of the optimizer's step. Buffers, random
    states and the counters of algorithms are then restored from before the batch, weights and optimizer from before the
    step, so that the weights are the same as if the smaller size had been used from the start. The following batches
    use the smaller size, too. Gradients are averaged only after all ranks have computed theirs. Before each step the
    weights and the optimizer's state are copied, which takes about as long as the step itself.

    Memory must not run out in AFTER_TRAIN_BATCH if a listener calls a collective there.

    Attributes:
        cumulative_alloc_retries: How often the allocator has freed its cache and retried, since the process started.
        num_consecutive_thrashes: The number of consecutive batches with such a retry on any rank; the second one halves
            the size.
        num_consecutive_non_oom_batches: The number of batches since the latest one that did not fit.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.cumulative_alloc_retries = 0
        self.num_consecutive_thrashes = 0
        self.num_consecutive_non_oom_batches = 0
        self._state = state

    def run(self, attempt: Callable[[], TResult]) -> TResult:
        """Attempt a batch and its step until they succeed on every rank. Every rank must call this."""
        undo = BatchUndo(self._state)
        while (result := self.result(attempt)) is None:
            # The restored random states make the next attempt draw the same numbers.
            undo()
            self._begin_smaller()
        self.num_consecutive_non_oom_batches += 1
        self._ease()
        return result

    @contextmanager
    def protected_weights(self, optimizers: Sequence[Optimizer], *, on_host: bool = False) -> Generator[None]:
        """Restore weights and optimizers at an error, or if the step in the context fails on another rank."""
        undo = StepSnapshot(optimizers, on_host=on_host)
        self.may_fail = True
        try:
            yield
            self.agree(thrashes=self._thrashes())
        except Exception:
            undo()
            raise

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
        self.num_consecutive_thrashes = self.num_consecutive_thrashes + 1 if self.any_thrashes else 0
        if self.num_consecutive_thrashes >= _MOST_THRASHES:
            self.num_consecutive_thrashes = 0
            _make_smaller(self._state, "time, since memory is short")


def halve(size: int | float) -> int | float | None:
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


def is_out_of_memory(error: Exception, kind: type[Exception] = RuntimeError) -> bool:
    """Return whether an error is a lack of device memory."""
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
