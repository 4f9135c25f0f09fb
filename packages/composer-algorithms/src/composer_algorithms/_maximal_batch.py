"""One microbatch as large as they come, run and forgotten, so that the memory it needs is there from then on."""

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_algorithms._loss import find_loss
from composer_dist import dist
from composer_dist.devices import get_precision_context

if TYPE_CHECKING:
    from composer_events.state import State

_log = logging.getLogger("composer.algorithms.seq_length_warmup")


def run_maximal_batch(state: "State", batch: dict[str, Any]) -> None:
    """Run the first microbatch of a batch forward and backward, and leave weights, gradients and draws as they were.

    With `state.auto_microbatching` a microbatch that does not fit into memory, on any rank, is halved on all of them.
    Every rank must call this.

    Raises:
        RuntimeError: If not even one sample fits.
    """
    size = _microbatch_size(state)
    while not _fits(state, batch, size):
        if size == 1:
            raise RuntimeError(
                "a microbatch of one sample of the maximal sequence length does not fit into the device's memory: "
                "lower max_seq_length, or use a smaller model."
            )
        size = max(size // 2, 1)
        _log.info("device_train_microbatch_size is %d now, for sequences of maximal length to fit.", size)
        state.device_train_microbatch_size = size


def _microbatch_size(state: "State") -> int:
    size: Any = state.device_train_microbatch_size
    if size is None:
        size = state.dataloader.batch_size  # an AttributeError names what a dataloader of another kind lacks
    if size is None:
        raise RuntimeError(
            "the dataloader has batch_size=None, so the size of a microbatch is not known: set "
            "device_train_microbatch_size."
        )
    return max(int(size), 1)


def _fits(state: "State", batch: dict[str, Any], size: int) -> bool:
    microbatch = {name: value[:size] if isinstance(value, Tensor) else value for name, value in batch.items()}
    has_failed = False
    try:
        _run(state, state.device.batch_to_device(microbatch))
    except torch.OutOfMemoryError:
        if not state.auto_microbatching:
            raise
        has_failed = True
    finally:
        for optimizer in state.optimizers:
            optimizer.zero_grad()
    if not state.auto_microbatching:
        return True
    failures = torch.tensor([int(has_failed)], dtype=torch.uint8, device=state.device.torch_device)
    dist.all_reduce(failures, reduce_operation="MAX")
    return not failures.item()


def _run(state: "State", microbatch: Any) -> None:
    devices = [state.device.torch_device.index] if state.device.torch_device.type == "cuda" else []
    with ExitStack() as stack:
        # A resumed run, which does not come here again, must draw the same numbers.
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(_without_sync(state.model))
        with _autocast(state):
            outputs = state.model(microbatch)
            loss = find_loss(state.model)(outputs, microbatch)
        loss.backward()


def _without_sync(model: Any) -> AbstractContextManager[Any]:
    # DDP builds its buckets in the first synchronised pass, which must be one of training.
    no_sync: Any = getattr(model, "no_sync", nullcontext)
    return no_sync()


def _autocast(state: "State") -> AbstractContextManager[Any]:
    if state.precision is None:
        return nullcontext()
    return get_precision_context(state.precision, state.precision_config, device_type=state.device.torch_device.type)
