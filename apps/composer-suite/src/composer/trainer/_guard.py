"""Whether an optimizer may step: what `BatchTrainer` asks, and the answer where nobody looks."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer


class Guard(Protocol):
    """What `BatchTrainer` asks around each step."""

    def begin_batch(self) -> None:
        """Remember what the forward passes of a batch may ruin."""
        ...

    def mark(self, loss: Tensor) -> Tensor:
        """Return the loss, so that no rank steps while a divergence has not reached the host yet."""
        ...

    def admits(self, optimizer: Optimizer, losses: Mapping[str, Tensor]) -> bool:
        """Say whether the optimizer may step with the gradients there are, or do about it what was asked for."""
        ...

    def refuses(self, optimizer: Optimizer, losses: Mapping[str, Tensor]) -> bool:
        """Say the contrary within a closure, and leave what is to be done to the end of the `closures`."""
        ...

    def closures(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return the context of a step of an optimizer that evaluates the loss itself."""
        ...

    def check_weights(self) -> None:
        """Raise if the weights are not fit to be saved. Every rank must call this."""
        ...

    def end_fit(self) -> None:
        """Wait for what is still on its way from the device, and act on it. Every rank must call this."""
        ...


class Unguarded:
    """Lets every step happen."""

    def begin_batch(self) -> None:
        """Do nothing."""

    def mark(self, loss: Tensor) -> Tensor:
        """Return the loss."""
        return loss

    def admits(self, optimizer: Optimizer, losses: Mapping[str, Tensor]) -> bool:
        """Say yes."""
        return True

    def refuses(self, optimizer: Optimizer, losses: Mapping[str, Tensor]) -> bool:
        """Say no."""
        return False

    def closures(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def check_weights(self) -> None:
        """Do nothing."""

    def end_fit(self) -> None:
        """Do nothing."""
