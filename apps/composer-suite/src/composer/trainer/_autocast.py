"""In which precision forward passes, losses and metrics are computed."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from composer_dist import get_precision_context
from composer_dist.devices import Precision
from composer_dist.strategy import Strategy
from composer_events.state import State

Autocast = Callable[[], AbstractContextManager[Any]]

_NOTHING = nullcontext()  # reentrant and without state, so one serves every microbatch


def make_autocast(state: State, strategy: Strategy) -> Autocast:
    """Return what makes the precision context of a state, as its precision, its device and what is around are now."""
    if strategy.has_own_precision:
        return nullcontext
    # The device is named once here; looking it up anew would cost more than the context itself.
    device_type = state.device.torch_device.type
    enter = functools.partial(get_precision_context, state.precision, state.precision_config, device_type=device_type)
    if state.precision is Precision.FP32 and not torch.is_autocast_enabled(device_type):
        return _do_nothing  # full precision has only to end an autocast around it
    return enter


def _do_nothing() -> AbstractContextManager[Any]:
    return _NOTHING
