"""Callbacks that act on a single event: learning rates, NaN losses and the memory of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_events.callback import Callback
from composer_events.logger import log_lazily
from composer_events.state import numbered
from composer_optim.schedule import BoundSchedule

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["FreeOutputs", "LRMonitor", "NaNMonitor"]


class LRMonitor(Callback):
    """Log the learning rate of every parameter group in each batch, as `lr-<optimizer's class>/group<index>`.

    The second optimizer of a class is `<class>#1`. Each `Schedule` is logged as `schedule/<target>`, with
    `/group<index>` for a parameter group.
    """

    def batch_start(self, state: State, logger: Logger) -> None:
        """Log the learning rates and the scheduled numbers."""
        for scheduler in getattr(state, "schedulers", ()):  # an engine's state need not have them
            if isinstance(scheduler, BoundSchedule):
                log_lazily(state, logger, _scheduled, scheduler.values)
        names = numbered([type(optimizer).__name__ for optimizer in state.optimizers])
        for name, optimizer in zip(names, state.optimizers, strict=True):
            for index, group in enumerate(optimizer.param_groups):
                rate = group["lr"]
                if isinstance(rate, float):
                    log_lazily(state, logger, _named, name, index, rate)
                else:  # a tensor may be changed in place before a lazy log reads it
                    logger.log_metrics(_named(state.timestamp, name, index, rate))


def _named(now: Timestamp, name: str, index: int, rate: Any) -> dict[str, Any]:
    del now  # `log_lazily` passes the timestamp
    return {f"lr-{name}/group{index}": rate}


def _scheduled(now: Timestamp, values: Mapping[str, float]) -> dict[str, Any]:
    del now
    return {f"schedule/{name}": value for name, value in values.items()}


class NaNMonitor(Callback):
    """Raise at the first batch with a NaN training loss, before the optimizer's step.

    On the CPU it raises at the microbatch. For an accelerator it waits once per batch, after the backward passes. The
    Trainer itself detects non-finite losses without synchronization.

    Raises:
        RuntimeError: In training, if a loss contains a NaN.
        TypeError: In training, if the loss is neither a tensor nor a sequence or dict of tensors.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[str, Tensor]] = []  # per part of a loss on an accelerator, whether it has a NaN

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Discard the losses of an attempt that ran out of memory."""
        self._unread.clear()

    def after_loss(self, state: State, logger: Logger) -> None:
        """Check `state.loss`, or leave it to `after_train_batch` if it is not on the CPU."""
        loss: Any = state.loss
        if isinstance(loss, Tensor):
            parts: list[tuple[str, Any]] = [("", loss)]
        elif isinstance(loss, Mapping):
            parts = [(f" {name}", part) for name, part in loss.items()]
        elif isinstance(loss, Sequence):
            parts = [("", part) for part in loss]
        else:
            raise _no_loss(loss)
        for name, part in parts:
            if not isinstance(part, Tensor):
                raise _no_loss(part)
            if not part.is_cpu:
                self._unread.append((name, part.detach().isnan().any()))
            elif isnan(part.item()) if part.numel() == 1 else part.isnan().any():
                _raise(state, name)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Check the losses of the batch that are on an accelerator."""
        if self._unread:
            names, flags = zip(*self._unread, strict=True)
            self._unread = []
            for name, is_bad in zip(names, torch.stack(flags).tolist(), strict=True):
                if is_bad:
                    _raise(state, name)


def _raise(state: State, name: str) -> None:
    raise RuntimeError(
        f"Train loss{name} contains a NaN. That is batch {state.timestamp.num_batches}, epoch "
        f"{state.timestamp.num_epochs}. Look at the batch and the learning rate before it."
    )


def _no_loss(loss: object) -> TypeError:
    return TypeError(f"The loss is a {type(loss).__name__}, and must be a tensor, or a sequence or dict of them.")


class FreeOutputs(Callback):
    """Free the model's outputs after the loss is computed, to save memory in the backward pass.

    Only for training without metrics, which would need the outputs later.
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        """Replace the outputs by an empty tensor."""
        state.outputs = torch.Tensor()
