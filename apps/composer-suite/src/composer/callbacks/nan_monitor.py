"""Stopping at a loss that is not a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["NaNMonitor"]


class NaNMonitor(Callback):
    """Raise when a loss of training is not a number, at the microbatch where it happens.

    It waits for the device at every microbatch, to say which one it was. The Trainer itself finds losses that are
    not finite without waiting.

    Raises:
        RuntimeError: When training, if a loss has a NaN.
        TypeError: When training, if the loss is neither a tensor nor a sequence or dict of tensors.
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        """Look at `state.loss`."""
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
    # Python looks at one number sooner than two kernels would; the device is waited for either way.
    return isnan(loss.item()) if loss.numel() == 1 else bool(torch.isnan(loss).any())
