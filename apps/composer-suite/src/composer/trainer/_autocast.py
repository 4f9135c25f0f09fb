"""In which precision forward passes, losses and metrics are computed."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from composer_dist import get_precision_context
from composer_dist.precision import Precision
from composer_dist.strategy import Strategy
from composer_events.state import State

Autocast = Callable[[], AbstractContextManager[Any]]

_NOTHING = nullcontext()  # reentrant and without state, so one serves every microbatch


def make_autocast(state: State, strategy: Strategy) -> Autocast:
    """Return what makes the precision context of a state, as its precision and device are now."""
    if strategy.has_own_precision:
        return nullcontext
    # The device is named once here; looking it up anew would cost more than the context itself.
    device_type = state.device.torch_device.type
    enter = functools.partial(get_precision_context, state.precision, state.precision_config, device_type=device_type)
    if state.precision is not Precision.FP32:
        return enter
    is_enabled = torch.is_autocast_enabled
    return lambda: enter() if is_enabled(device_type) else _NOTHING  # in full precision only one around it matters
