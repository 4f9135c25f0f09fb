"""Freeing of the model's outputs after the loss is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["FreeOutputs"]


class FreeOutputs(Callback):
    """Free the model's outputs after the loss is computed, to save memory in the backward pass.

    Only for training without metrics, which would need the outputs later.
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        """Replace the outputs by an empty tensor."""
        state.outputs = torch.Tensor()
