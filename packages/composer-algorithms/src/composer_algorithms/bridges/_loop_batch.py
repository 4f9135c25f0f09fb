"""The batch that a loop of the user's own works on: what is assigned to it tells the engine how far the loop is."""

from typing import Any

from torch import Tensor

from composer_algorithms.bridges._loop_events import LoopEvents, check_loss
from composer_algorithms.bridges._refusals import computes_between
from composer_events.engine import Traces
from composer_events.event import Event

__all__ = ["LoopBatch"]


class LoopBatch:
    """What is trained on, or evaluated, at the moment.

    Read the inputs, assign `outputs`, then read the targets and assign `loss`: in between algorithms act, so inputs and
    targets are to be read from here, each when it is needed. In evaluation there is no loss to assign.
    """

    def __init__(self, events: LoopEvents, phase: str = "") -> None:
        self._events = events
        self._phase = phase
        self._has_outputs = False
        self._has_loss = False
        self._unread: Traces | None = None  # what algorithms did to the batch since it was last read
        self._run("before_forward")

    @property
    def batch(self) -> Any:
        """The batch as it is now."""
        self._unread = None
        return self._events.state.batch

    @property
    def inputs(self) -> Any:
        """The first part of the batch as it is now."""
        return self.batch[0]

    @property
    def targets(self) -> Any:
        """The second part of the batch as it is now."""
        return self.batch[1]

    @property
    def outputs(self) -> Any:
        """What the model gave. Assign it before the loss is computed."""
        return self._events.state.outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self._refuse_unread("outputs", "inputs")
        self._events.state.outputs = outputs
        self._has_outputs = True
        self._run("after_forward")
        if not self._phase:
            self._run("before_loss")

    @property
    def loss(self) -> Any:
        """The loss. Assign it at the end of the block; the backward pass is up to the loop."""
        return self._events.state.loss

    @loss.setter
    def loss(self, loss: Tensor) -> None:
        if self._phase:
            raise RuntimeError("b.loss was assigned in an evaluation, where no loss is minimised: assign b.outputs.")
        if not self._has_outputs:
            between = [type(one).__name__ for one in self._events.state.algorithms if computes_between(one)]
            if between:
                raise RuntimeError(
                    f"b.loss was assigned before b.outputs, and {', '.join(between)} acts in between. Assign b.outputs "
                    f"= model(b.inputs), then compute the loss of b.outputs and b.targets."
                )
            self._run("after_forward")
            self._run("before_loss")
        self._refuse_unread("loss", "targets")
        self._events.state.loss = check_loss(loss, "b.loss")
        self._has_loss = True
        self._run("after_loss")

    def finish(self) -> Any:
        """Return the loss to minimise, or in evaluation the outputs.

        Raises:
            RuntimeError: If the block has not assigned it.
        """
        name, is_there = ("outputs", self._has_outputs) if self._phase else ("loss", self._has_loss)
        if not is_there:
            raise RuntimeError(f"The block of the batch ended without b.{name}: assign it, as in `b.{name} = ...`.")
        return self.outputs if self._phase else self.loss

    def _run(self, event: str) -> None:
        traces = self._events.engine.run_event(Event(f"{self._phase}{event}"))
        if traces and event != "after_loss":  # by then the batch has done its work
            self._unread = traces

    def _refuse_unread(self, assigned: str, part: str) -> None:
        if self._unread:
            raise RuntimeError(
                f"b.{assigned} was assigned, and {_names(self._unread)} changed the batch before, which nobody has "
                f"read since. Compute it from b.{part} or b.batch, read in the block where it is needed, and not from "
                f"variables of your own."
            )


def _names(traces: Traces) -> str:
    return ", ".join(trace.name for trace in traces.values())
