"""A copy of all that training changes in memory, to go back to after many steps."""

from torch import nn
from torch.optim import Optimizer

from composer.trainer._kept_buffers import KeptBuffers
from composer.trainer._undo import StepUndo


class Snapshot:
    """A copy of weights, buffers and an optimizer's state, each rank's own part of them.

    Learning rates are not part of it: the schedule goes on.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._buffers = KeptBuffers(model)
        self._buffers.keep()
        self._undo_steps = StepUndo(optimizer, with_settings=False)

    def restore(self) -> None:
        """Make all of it what it was. The copy stays good for another time."""
        self._buffers.restore()
        self._undo_steps()
