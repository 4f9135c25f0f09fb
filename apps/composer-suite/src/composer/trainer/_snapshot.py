"""A copy of what a step changes, in memory, to go back to."""

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class KeptBuffers:
    """A copy of a model's buffers, such as running means, which a forward pass over a bad batch ruins.

    Args:
        model: Its buffers are looked up once.
        num_batches: Of how many batches the copies are kept.
    """

    def __init__(self, model: nn.Module, num_batches: int) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._kept: deque[list[Tensor]] = deque(maxlen=num_batches)

    def keep(self) -> None:
        """Copy the buffers as they are before a batch."""
        if self._buffers:
            self._kept.append([buffer.detach().clone() for buffer in self._buffers])

    @torch.no_grad()
    def restore(self) -> None:
        """Make the buffers what they were before the earliest of the batches."""
        for buffer, kept in zip(self._buffers, self._kept[0] if self._kept else (), strict=False):
            buffer.copy_(kept)


class Snapshot:
    """A copy of weights, buffers and an optimizer's state, each rank's own part of them.

    Learning rates are not part of it: the schedule goes on.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._kept = [tensor.detach().clone() for tensor in self._tensors]
        self._state = _copy_values(optimizer.state)

    @torch.no_grad()
    def restore(self) -> None:
        """Make all of it what it was. The copy stays good for another time."""
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)
        self._optimizer.state.clear()
        self._optimizer.state.update(_copy_values(self._state))


def _copy_values(state: Any) -> dict[Any, Any]:
    """Copy an optimizer's state; its keys are the parameters themselves."""
    return {parameter: copy.deepcopy(values) for parameter, values in state.items()}
