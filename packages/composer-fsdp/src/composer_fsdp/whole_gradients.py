"""Averaging the gradients of what is not sharded where no strategy does it: in a loop of one's own."""

from collections.abc import Sequence

import torch
from torch.autograd import Variable

from composer_dist import dist
from composer_dist.ddp import average_gradients

__all__ = ["average_after_backward"]


def average_after_backward(parameters: Sequence[torch.Tensor]) -> None:
    """Let the gradients of parameters be averaged over all ranks at the end of each backward pass, in place.

    Sharded gradients are averaged by then, too. A mean of means and of what was added since is the mean of the sums, so
    that gradients may be accumulated over several backward passes. Every rank has to come through one of the
    parameters in the same passes.

    Args:
        parameters: Whole on every rank, the same and in the same order.
    """
    if not parameters or dist.get_world_size() == 1:
        return
    averaging = _Averaging(parameters)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(averaging)


class _Averaging:
    """Averages once in each backward pass, when all gradients are there."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._pass = -1

    def __call__(self, _: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()  # of this backward pass; torch has no public name for it
        if number != self._pass:
            self._pass = number
            # Called at the end of the pass, as FSDP2 reduces what is left; torch has no public way to queue it.
            Variable._execution_engine.queue_callback(self._average)  # pyright: ignore[reportAttributeAccessIssue]

    def _average(self) -> None:
        average_gradients(self._parameters)
