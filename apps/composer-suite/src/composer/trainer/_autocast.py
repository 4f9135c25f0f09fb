"""In which precision forward passes, losses and metrics are computed."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from composer_dist import get_precision_context
from composer_dist.strategy import Strategy
from composer_events.state import State

Autocast = Callable[[], AbstractContextManager[Any]]


def make_autocast(state: State, strategy: Strategy) -> Autocast:
    """Return what makes the precision context of a state, as its precision and device are now."""
    if strategy.has_own_precision:
        return nullcontext
    # The device is named once here; looking it up anew would cost more than the context itself.
    device_type = state.device.torch_device.type
    return functools.partial(get_precision_context, state.precision, state.precision_config, device_type=device_type)
