"""Numbers on their way from a device to the host, which reads them a few batches later."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

LAG = 2  # batches; until then the device has enough to do for nobody to notice that the host waits


class Arrivals:
    """Brings a few numbers of each batch to the host, in their order.

    They are read after a fixed number of batches, on all ranks alike: a rank that acted on what has just happened to
    arrive would leave the others alone in their next collective.

    Args:
        device: Where they are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[tuple[int, Tensor, torch.Event]] = deque()

    def send(self, batch: int, numbers: Tensor) -> None:
        """Start the copy of a batch's numbers, which may change from now on."""
        on_host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
        event = torch.Event(self._device)
        event.record()
        self._waiting.append((batch, on_host, event))

    def take(self, *, wait: bool = False) -> Iterator[tuple[int, list[float]]]:
        """Yield the numbers that are due, each with its batch.

        Args:
            wait: Whether to wait for all that were sent.
        """
        while len(self._waiting) > (0 if wait else LAG):
            batch, on_host, event = self._waiting.popleft()
            event.synchronize()
            yield batch, on_host.tolist()

    def forget(self) -> None:
        """Drop what has not been taken."""
        self._waiting.clear()
