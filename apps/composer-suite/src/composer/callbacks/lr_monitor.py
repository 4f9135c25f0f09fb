"""The learning rates in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["LRMonitor"]


class LRMonitor(Callback):
    """Log the learning rate of every group of parameters after each batch, as `lr-<optimizer's class>/group<index>`."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log them."""
        for optimizer in state.optimizers:
            name = type(optimizer).__name__
            for index, group in enumerate(optimizer.param_groups):
                logger.log_metrics({f"lr-{name}/group{index}": group["lr"]})
