"""Callbacks that act on a single event: learning rates, NaN losses and the memory of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_events.callback import Callback
from composer_events.logger import log_lazily
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
        for scheduler in state.schedulers:
            if isinstance(scheduler, BoundSchedule):
                log_lazily(state, logger, _scheduled, scheduler.values)
        classes: list[str] = []
        for optimizer in state.optimizers:
            classes.append(type(optimizer).__name__)
            repeats = classes.count(classes[-1]) - 1
            name = f"{classes[-1]}#{repeats}" if repeats else classes[-1]
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
    """Raise at the first microbatch with a NaN training loss.

    It synchronizes with the device at every microbatch to identify it. The Trainer itself detects non-finite losses
    without synchronization.

    Raises:
        RuntimeError: In training, if a loss contains a NaN.
        TypeError: In training, if the loss is neither a tensor nor a sequence or dict of tensors.
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        """Check `state.loss`."""
        loss: Any = state.loss
        if isinstance(loss, Tensor):
            if loss.ndim == 0 and not isnan(loss.item()):
                return  # the usual case
            parts: dict[str, bool] = {"": _has_nan(loss)}
        elif isinstance(loss, Mapping):
            parts = {f" {name}": _has_nan(part) for name, part in loss.items()}
        elif isinstance(loss, Sequence):
            parts = {"": any(_has_nan(part) for part in loss)}
        else:
            raise _no_loss(loss)
        for name, is_bad in parts.items():
            if is_bad:
                raise RuntimeError(
                    f"Train loss{name} contains a NaN. That is batch {state.timestamp.num_batches}, epoch "
                    f"{state.timestamp.num_epochs}. Look at the batch and the learning rate before it."
                )


def _no_loss(loss: object) -> TypeError:
    return TypeError(f"The loss is a {type(loss).__name__}, and must be a tensor, or a sequence or dict of them.")


def _has_nan(loss: Any) -> bool:
    if not isinstance(loss, Tensor):
        raise _no_loss(loss)
    # For a single number, `item` is faster than two kernels; both synchronize.
    return isnan(loss.item()) if loss.numel() == 1 else bool(torch.isnan(loss).any())


class FreeOutputs(Callback):
    """Free the model's outputs after the loss is computed, to save memory in the backward pass.

    Only for training without metrics, which would need the outputs later.
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        """Replace the outputs by an empty tensor."""
        state.outputs = torch.Tensor()
