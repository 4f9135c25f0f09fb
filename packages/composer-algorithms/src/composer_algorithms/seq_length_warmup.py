"""Sequence length warm-up: train on short sequences first and increase their length during training."""

import copy
import logging
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from composer_algorithms._arguments import check_counts, check_interval
from composer_algorithms._loss import find_loss, precision_context
from composer_algorithms._method import NO_LENGTH, Method
from composer_algorithms._tensors import UnsupportedBatchError
from composer_algorithms.metadata import METHODS
from composer_dist import dist
from composer_dist.reproducibility import device_rng
from composer_dist.wrapping import unwrap_model
from composer_events import Event, Logger, State, ensure_tuple
from composer_time import TimeUnit

__all__ = ["SeqLengthWarmup", "set_batch_sequence_length", "METADATA"]

METADATA = METHODS["seq_length_warmup"]

_log = logging.getLogger("composer.algorithms.seq_length_warmup")

TBatch = TypeVar("TBatch", bound=MutableMapping[str, Any])


def set_batch_sequence_length(
    batch: TBatch,
    curr_seq_len: int,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
    *,
    non_sequence_keys: Collection[str] = (),
) -> TBatch:
    """Shorten the sequences of a batch.

    Args:
        batch: Tensors of shape `(batch, length, ...)` by name. Not changed.
        curr_seq_len: New length. If the sequences do not exceed it, the batch itself is returned.
        truncate: Truncate the sequences. Otherwise the batch is split into more sequences of the new length, dropping
            an incomplete one at its end, and `position_ids` start from 0 in each, and in each packed document.
        preserve_end_of_sequence: When truncating, put each sequence's last token (by `attention_mask`) at the new end.
        non_sequence_keys: Names of entries without a length dim, which are not changed. Only with `truncate`.

    Returns:
        A batch of the same type with shorter sequences.

    Raises:
        TypeError: If the batch is not a mapping.
        ValueError: If the length is less than 1, a tensor has no length dim, `attention_mask` is required and missing,
            or, with `truncate=False`, `input_ids` is missing or the tensors differ in shape.

    Example:
        >>> batch = {"input_ids": torch.arange(8).view(2, 4)}
        >>> set_batch_sequence_length(batch, 2)["input_ids"]
        tensor([[0, 1],
                [4, 5]])
        >>> set_batch_sequence_length(batch, 2, truncate=False)["input_ids"].shape
        torch.Size([4, 2])

    Reference:
        Li et al., "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models",
        2021, arXiv:2108.06084.
    """
    if not isinstance(batch, Mapping):
        raise UnsupportedBatchError(
            f"the batch is a {type(batch).__qualname__}, and sequences are found by name: use batches that are "
            f"mappings of tensors, such as {{'input_ids': ...}}."
        )
    check_counts(curr_seq_len=curr_seq_len)
    sequences = _sequences(batch, non_sequence_keys)
    length = next((value.shape[1] for value in sequences.values() if value.ndim > 1), None)
    if length is None:
        raise ValueError(
            f"no tensor of the batch has a length dim: its keys are {list(sequences)}. Pass tensors of shape (batch, "
            f"length, ...)."
        )
    if curr_seq_len >= length:
        return batch
    if not truncate:
        shorter = _cut_into_several(sequences, curr_seq_len)
    else:
        shorter = {name: _truncated(name, value, curr_seq_len) for name, value in sequences.items()}
    if truncate and preserve_end_of_sequence:
        if (mask := sequences.get("attention_mask")) is None:
            raise ValueError(
                f"preserve_end_of_sequence=True finds the ends by 'attention_mask', and the batch has the keys "
                f"{list(sequences)}: add it, or pass preserve_end_of_sequence=False."
            )
        end = mask.sum(dim=1).long() - 1  # assumes padding on the right
        rows = torch.arange(len(mask), device=mask.device)
        for name, value in shorter.items():
            value[rows, end.clamp(max=curr_seq_len - 1)] = sequences[name][rows, end]
    result = copy.copy(batch)  # keeps the type, such as BatchEncoding
    result.update(shorter)
    return result


@dataclass(repr=False, eq=False)
class SeqLengthWarmup(Method):
    """Increase the sequence length during training.

    On `AFTER_DATALOADER` it applies `set_batch_sequence_length` to `state.batch`, with a length that grows from
    `min_seq_length` in steps of `step_size` and reaches `max_seq_length` after the fraction `duration` of training. It
    logs `seq_length_warmup/curr_seq_len` and `/curr_bs`. Before the first step, except with DeepSpeed, it runs one
    microbatch of the maximal length forward and backward, so that an out-of-memory error occurs at the start;
    gradients and random state are restored.

    The model must have an attribute `model`, like `HuggingFaceModel`, and batches must be mappings.

    Args:
        duration: Fraction of training in which the length grows, in [0, 1].
        min_seq_length: Initial length.
        max_seq_length: Final length.
        step_size: Increment of the length.
        truncate: See `set_batch_sequence_length`.
        preserve_end_of_sequence: See `set_batch_sequence_length`.
        non_sequence_keys: See `set_batch_sequence_length`.

    Raises:
        ValueError: If `duration` is outside [0, 1], a length or `step_size` is less than 1, or `max_seq_length` is less
            than `min_seq_length`.

    Example:
        >>> SeqLengthWarmup(duration=0.5, max_seq_length=64).seq_length(warmup_done=0.5)
        32

    Reference:
        Li et al., "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models",
        2021, arXiv:2108.06084.
    """

    surgery_rank = 7
    computes_losses = True  # of the batch of maximal length
    acts_on = frozenset({Event.INIT, Event.AFTER_DATALOADER})

    duration: float = 0.3
    min_seq_length: int = 8
    max_seq_length: int = 1024
    step_size: int = 8
    truncate: bool = True
    preserve_end_of_sequence: bool = False
    _: KW_ONLY
    non_sequence_keys: Collection[str] = ()

    def __post_init__(self) -> None:
        check_interval("[0, 1]", duration=self.duration)
        check_counts(min_seq_length=self.min_seq_length, max_seq_length=self.max_seq_length, step_size=self.step_size)
        if self.max_seq_length < self.min_seq_length:
            raise ValueError(
                f"max_seq_length={self.max_seq_length!r} is less than min_seq_length={self.min_seq_length!r}: the "
                f"length grows from the one to the other."
            )
        self.non_sequence_keys = ensure_tuple(self.non_sequence_keys)
        self._activated = False  # set it to True to skip the microbatch of maximal length
        self._is_checked = False

    def seq_length(self, warmup_done: float | Fraction) -> int:
        """Return the sequence length.

        Args:
            warmup_done: Completed fraction of the warm-up, 0 or more. From 1 on the length is maximal.
        """
        if warmup_done >= 1:
            return self.max_seq_length
        num_steps = (self.max_seq_length - self.min_seq_length) // self.step_size
        return self.min_seq_length + self.step_size * int(num_steps * warmup_done)

    def match(self, event: Event, state: State) -> bool:
        """Return whether the model has yet to be validated, or a batch has just been loaded."""
        return (event == Event.INIT and not self._is_checked) or event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Validate the model on INIT, and shorten the sequences on AFTER_DATALOADER."""
        if event == Event.INIT:
            if not isinstance(getattr(unwrap_model(state.model), "model", None), nn.Module):
                raise RuntimeError(
                    f"SeqLengthWarmup needs a model that wraps one of Hugging Face, with the attribute model, and "
                    f"this is a {type(state.model).__qualname__}: wrap it in a HuggingFaceModel."
                )
            self._is_checked = True
            return
        length = self.seq_length(self._warmup_done(state))
        # Before the batch is shortened, since the maximal batch is made from it.
        if not self._activated and not state.deepspeed_enabled:
            # Repeat shorter sequences up to the length: memory depends on the number of tokens, not on their values.
            maximal = dict(state.batch)
            for name, value in _sequences(state.batch, self.non_sequence_keys).items():
                if value.ndim > 1:
                    steps = torch.arange(self.max_seq_length, device=value.device)
                    maximal[name] = value[:, steps % value.shape[1]]
            _run_maximal_batch(state, maximal)
            self._activated = True
        state.batch = set_batch_sequence_length(
            state.batch,
            length,
            self.truncate,
            self.preserve_end_of_sequence,
            non_sequence_keys=self.non_sequence_keys,
        )
        if logger is not None:
            first = next(iter(_sequences(state.batch, self.non_sequence_keys).values()))
            logger.log_metrics({"seq_length_warmup/curr_seq_len": length, "seq_length_warmup/curr_bs": len(first)})

    def state_dict(self) -> dict[str, Any]:
        """Return the state, including whether the microbatch of maximal length has been run."""
        return {**super().state_dict(), "activated": self._activated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore whether the microbatch of maximal length has been run."""
        super().load_state_dict(state)
        self._activated = bool(state.get("activated", False))

    def _warmup_done(self, state: State) -> float | Fraction:
        max_duration = state.max_duration
        if max_duration is None:
            raise RuntimeError(NO_LENGTH.format("SeqLengthWarmup"))
        if self.duration == 0:
            return 1
        if max_duration.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            return float(state.timestamp.get(max_duration.unit) / max_duration) / self.duration
        # Count batches, since the epoch of the timestamp does not change within an epoch.
        num_batches = max_duration.value
        if max_duration.unit == TimeUnit.EPOCH:
            if state.dataloader_len is None:
                raise RuntimeError(
                    f"max_duration={str(max_duration)!r} and a dataloader without a length do not say how many batches "
                    f"there will be: give max_duration in batches ('500ba'), samples or tokens, or set dataloader_len."
                )
            num_batches *= state.dataloader_len.value
        warmup = int(num_batches * self.duration)
        # A Fraction, because a rounded quotient could miss a step of the length by one batch. A warm-up of less than
        # one batch is complete from the start.
        return Fraction(state.timestamp.batch.value, warmup) if warmup else 1


def _sequences(batch: Mapping[str, Any], non_sequence_keys: Collection[str]) -> dict[str, Tensor]:
    sequences: dict[str, Tensor] = {}
    for name, value in batch.items():
        if name in non_sequence_keys:
            continue
        if not isinstance(value, Tensor):
            raise UnsupportedBatchError(
                f"batch[{name!r}] is a {type(value).__qualname__}, but sequences are tensors of shape (batch, length, "
                f"...): if it is not a sequence, name it in non_sequence_keys."
            )
        sequences[name] = value
    return sequences


def _truncated(name: str, value: Tensor, length: int) -> Tensor:
    if value.ndim < 2:
        raise ValueError(
            f"batch[{name!r}] of shape {tuple(value.shape)} has no length dim to truncate: pass (batch, length, "
            f"...), or name it in non_sequence_keys."
        )
    # A copy even of a single sequence, whose slice is contiguous: the last token is written into it.
    return value[:, :length].clone(memory_format=torch.contiguous_format)


def _cut_into_several(sequences: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    if "input_ids" not in sequences:
        raise ValueError(
            f"truncate=False splits batches with 'input_ids', and this one has the keys {list(sequences)}: add them, "
            f"or pass truncate=True."
        )
    shape = sequences["input_ids"].shape
    shorter: dict[str, Tensor] = {}
    for name, value in sequences.items():
        if value.shape != shape:
            raise ValueError(
                f"batch[{name!r}] of shape {tuple(value.shape)} cannot be split with 'input_ids' of shape "
                f"{tuple(shape)}: with truncate=False all tensors need one shape. Pass truncate=True."
            )
        whole = value.flatten()
        shorter[name] = whole[: len(whole) // length * length].view(-1, length)
    if "position_ids" in shorter:  # from 0 at the start of each new sequence, and of each packed document in it
        from composer_models.packing import document_numbers  # loads the metrics

        positions = sequences["position_ids"]
        numbers = document_numbers(positions)
        is_start = numbers.diff(dim=1, prepend=numbers[:, :1]) > 0
        is_start[:, 0] = is_start.any()  # only packed sequences are not joined where a new one spans two
        is_start = is_start.flatten()[: shorter["position_ids"].numel()].view(-1, length)
        columns = torch.arange(length, device=positions.device, dtype=positions.dtype).expand_as(is_start)
        shorter["position_ids"] = columns - torch.where(is_start, columns, 0).cummax(dim=1).values
    return shorter


def _run_maximal_batch(state: State, batch: dict[str, Any]) -> None:
    """Run the first microbatch forward and backward without changing weights, gradients or random state.

    The allocator then holds the memory that the largest microbatch needs. With `state.auto_microbatching`, a
    microbatch that does not fit on some rank is halved on all ranks. Every rank must call this.
    """
    given: Any = state.device_train_microbatch_size
    given = state.dataloader.batch_size if given is None else given
    if given is None:
        raise RuntimeError(
            "the dataloader has batch_size=None, so the size of a microbatch is not known: set "
            "device_train_microbatch_size."
        )
    size = max(int(given), 1)
    while not _fits(state, batch, size):
        if size == 1:
            raise RuntimeError(
                "a microbatch of one sample of the maximal sequence length does not fit into the device's memory: "
                "lower max_seq_length, or use a smaller model."
            )
        size = max(size // 2, 1)
        _log.info("device_train_microbatch_size is now %d, so that sequences of maximal length fit.", size)
        state.device_train_microbatch_size = size


def _fits(state: State, batch: dict[str, Any], size: int) -> bool:
    microbatch = {name: value[:size] if isinstance(value, Tensor) else value for name, value in batch.items()}
    device, has_failed = state.device.torch_device, False
    own = device_rng(device)
    try:
        # A resumed run skips this pass and must draw the same random numbers as this one. DDP builds its buckets in the
        # first synchronized pass, which must be a training pass.
        with torch.random.fork_rng(devices=[]), getattr(state.model, "no_sync", nullcontext)():
            with precision_context(state, device.type):
                microbatch = state.device.batch_to_device(microbatch)
                loss = find_loss(state.model)(state.model(microbatch), microbatch)
            loss.backward()
    except torch.OutOfMemoryError:
        if not state.auto_microbatching:
            raise
        has_failed = True
    finally:
        if own is not None:
            restore, draws = own
            restore(draws)
        for optimizer in state.optimizers:
            optimizer.zero_grad()
    if not state.auto_microbatching:
        return True
    # All ranks must agree on the size, or their collectives in backward would not pair up.
    failures = torch.tensor([int(has_failed)], dtype=torch.uint8, device=device)
    dist.all_reduce(failures, reduce_operation="MAX")
    return not failures.item()
