"""Sizes of microbatches, from the arguments of the Trainer."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer.trainer._arguments import user_stacklevel
from composer.trainer._sharding import as_fsdp
from composer_dist.ddp import DDP
from composer_dist.devices import Device
from composer_dist.strategy import Strategy
from composer_events.batches import ensure_tuple
from composer_events.data_spec import DataSpec, default_split_batch
from composer_events.state import State

_AUTO = "auto"
_COUNTED = (
    "train_dataloader=DataSpec(dataloader, get_num_tokens_in_batch=count), where count(batch) returns "
    "{'total': ..., 'loss_generating': ...}."
)
_IGNORED = -100  # the default `ignore_index` of torch's losses and of transformers


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
    def of(cls, size: Any, grad_accum: Any, device: Device, *, profiler: Any = None) -> "Microbatching":
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
        if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float))):
            raise ValueError(
                f"device_train_microbatch_size must be an int or ``'auto'``: device_train_microbatch_size={size!r} is "
                "not a number of samples. Leave it out to train on whole batches."
            )
        if size is not None and not size > 0:
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
        if self.is_auto:
            _refuse_parts_of_samples(data_spec)
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
            f"{_IGNORED}, which enter no loss. Count them separately: {_COUNTED}",
            stacklevel=user_stacklevel(),
        )


def _has_ignored_labels(batch: Any) -> bool:
    parts = ensure_tuple(batch) if isinstance(batch, (Mapping, list, tuple)) else ()
    labels = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype in (torch.int32, torch.int64)]
    # Sparse and nested tensors do not support the comparison.
    return any(
        each.layout is torch.strided and not each.is_nested and bool((each == _IGNORED).any()) for each in labels
    )


def refuse_unrepeatable(microbatching: Microbatching, strategy: Strategy, *, is_deepspeed: bool = False) -> None:
    """Reject `'auto'` if a step cannot be repeated."""
    if not microbatching.is_auto:
        return
    if isinstance(strategy, DDP) and strategy.comm_hook is not None:
        raise ValueError(
            f"device_train_microbatch_size='auto' does not go with ddp_comm_hook={strategy.comm_hook!r}: gradients are "
            "averaged after the backward pass, without the hook. Leave the hook out, or give the size as a number."
        )
    if fsdp := as_fsdp(strategy):
        fsdp.check_repeatable()
    if is_deepspeed:
        raise ValueError(
            "device_train_microbatch_size='auto' does not go with deepspeed_config: DeepSpeed's engine cannot repeat "
            "a step. Give the size as a number."
        )


def _not_positive(size: Any) -> str:
    return f"device_train_microbatch_size={size!r} must be a whole number of samples greater than 0."


def _check_grad_accum(count: Any) -> None:
    if count != _AUTO and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(
            f"grad_accum={count!r} must be a whole number of microbatches from 1, or 'auto'. Better give "
            "device_train_microbatch_size, the number of samples in each."
        )
    newer = "'auto'" if count == _AUTO else f"the batch size of a rank divided by {count}"
    warnings.warn(
        f"grad_accum={count!r} is an older spelling. Write device_train_microbatch_size=..., here {newer}. A "
        "DataSpec's split_batch gets a number of samples, not of microbatches. It goes with release 1.0.",
        DeprecationWarning,
        stacklevel=user_stacklevel(),
    )


def _check_auto(name: str, device: Device, profiler: Any) -> None:
    if profiler is not None:
        raise ValueError(
            f"{name}='auto' is not compatible with the profiler, which would record attempts that fail. Find the "
            "size without profiler=..., then give it as a number."
        )
    if device.name != "gpu":
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


def size_of_batches(dataloader: Any) -> Any:
    """Return the batch size of a dataloader, or `None`."""
    size = getattr(dataloader, "batch_size", None)
    # With a custom batch_sampler, the `batch_size` of the DataLoader is None.
    return getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None) if size is None else size


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


def _refuse_parts_of_samples(data_spec: DataSpec) -> None:
    for holder in (data_spec, data_spec.dataloader):
        parallel: Any = getattr(holder, "seq_parallel_world_size", 1)
        if parallel != 1:
            raise ValueError(
                "device_train_microbatch_size='auto' does not go with the dataloader's seq_parallel_world_size="
                f"{parallel!r}, where each sample is spread over ranks. Give the microbatch size as a number."
            )
