"""Logging of the learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_events.callback import Callback
from composer_events.logger import log_lazily

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["LRMonitor"]


class LRMonitor(Callback):
    """Log the learning rate of every parameter group in each batch, as `lr-<optimizer's class>/group<index>`."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Log the learning rates."""
        for optimizer in state.optimizers:
            name = type(optimizer).__name__
            for index, group in enumerate(optimizer.param_groups):
                rate = group["lr"]
                if isinstance(rate, float):
                    log_lazily(state, logger, _named, name, index, rate)
                else:  # a tensor may be changed in place before a lazy log reads it
                    logger.log_metrics(_named(state.timestamp, name, index, rate))


def _named(now: Timestamp, name: str, index: int, rate: Any) -> dict[str, Any]:
    del now  # `log_lazily` passes the timestamp
    return {f"lr-{name}/group{index}": rate}
