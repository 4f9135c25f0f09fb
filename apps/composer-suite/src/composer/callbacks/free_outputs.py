"""Letting go of the outputs as soon as the loss is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["FreeOutputs"]


class FreeOutputs(Callback):
    """Let go of a model's outputs once the loss is known, to make room for the backward pass.

    For models without training metrics, which need the outputs later.
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        """Put an empty tensor in place of the outputs."""
        state.outputs = torch.Tensor()
