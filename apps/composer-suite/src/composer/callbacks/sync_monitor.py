"""Counting of the lines of code that make the host wait for the GPU."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from composer_dist import dist
from composer_events.arguments import check_counts
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["SyncMonitor"]

_log = logging.getLogger(__name__)
_MESSAGE = "called a synchronizing"  # the start of the warnings of `torch.cuda.set_sync_debug_mode`
_FILES_TO_SKIP = (str(Path(torch.__file__).parent), __file__)
_MOST_LINES = 10  # in the report at the end


class SyncMonitor(Callback):
    """Log which lines of code make the host wait for the GPU during training.

    After such a line the GPU is idle until the host has queued more work. The log names a line, the innermost one
    outside PyTorch, after the first batch in which it waits, and at the end of training how often each line waits per
    batch. The number of waits of each batch is logged as `synchronizations/per_batch`. Evaluations are not counted. A
    run in which no line waits is as fast as without this callback.

    On NVIDIA and AMD GPUs it uses `torch.cuda.set_sync_debug_mode`, which does not see waits for events, and no waits
    of libraries other than PyTorch. It also works on a `composer_dist.testing.SimulatedAccelerator`.

    Args:
        skip_batches: Number of batches at the start of each fit that are not counted, because memory allocation and
            compilation wait there.

    Attributes:
        lines: Number of waits of each line (`file:line function`) in the latest fit.
        num_batches: Number of batches in which they were counted.

    Raises:
        ValueError: If `skip_batches` is negative.

    Example:
        >>> monitor = SyncMonitor(skip_batches=5)
    """

    def __init__(self, skip_batches: int = 2) -> None:
        check_counts(least=0, skip_batches=skip_batches)
        self.skip_batches = skip_batches
        self.lines: Counter[str] = Counter()
        self.num_batches = 0
        self._num_skipped = 0
        self._counting = ExitStack()
        self._live: Counter[str] | None = None  # the counter to which the device adds

    def init(self, state: State, logger: Logger) -> None:
        """Warn if training does not run on a device whose waits are known."""
        if not _can_count(state):
            device = state.device.torch_device.type
            warnings.warn(f"SyncMonitor only works on CUDA devices, but training runs on {device}.", stacklevel=2)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reset the counts."""
        self._stop()
        self.lines, self.num_batches, self._num_skipped = Counter(), 0, 0

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start counting after the skipped batches."""
        if self._live is None and self._num_skipped >= self.skip_batches and _can_count(state):
            counting: Any = getattr(state.device, "counting", None)
            if counting is None:
                self._live = self._counting.enter_context(_counting_on_cuda())
            else:
                self._live = self._counting.enter_context(counting()).synchronizations
        self._num_skipped += self._live is None

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the waits of the batch."""
        if self._live is None:
            return
        known = set(self.lines)
        found = self._take()
        self.num_batches += 1
        batch, new = state.timestamp.num_batches - 1, found.keys() - known
        logger.log_metrics({"synchronizations/per_batch": found.total()})
        if new and dist.get_global_rank() == 0:
            named = "".join(f"\n    {place}" + f" ({found[place]} times)" * (found[place] > 1) for place in sorted(new))
            _log.warning("Batch %d waited for the device at:%s", batch, named)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Count the waits since the end of the last batch."""
        self._take()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Discard the waits of an evaluation, which follows the end of a batch."""
        if self._live is not None:
            self._live.clear()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Stop counting, and log the mean number of waits of each line."""
        is_measured = self._live is not None
        self._stop()
        if not is_measured or dist.get_global_rank() != 0:
            return
        most = self.lines.most_common(_MOST_LINES)
        rows = [f"\n    {count / self.num_batches:.4g} at {place}" for place, count in most]
        _log.log(
            logging.WARNING if rows else logging.INFO,
            "The host waited for the device %.4g times per batch, in %d batches%s%s",
            self.lines.total() / self.num_batches,
            self.num_batches,
            ":" if rows else ".",
            "".join(rows),
        )

    def close(self, state: State, logger: Logger) -> None:
        """Stop counting."""
        self._stop()

    def _take(self) -> Counter[str]:
        found = Counter(self._live)
        if self._live is not None:
            self._live.clear()
        self.lines += found
        return found

    def _stop(self) -> None:
        self._counting.close()
        self._live = None


def _can_count(state: State) -> bool:
    return state.device.torch_device.type == "cuda" or hasattr(state.device, "counting")


@contextmanager
def _counting_on_cuda() -> Generator[Counter[str]]:
    """Count the warnings of PyTorch's debug mode by line, and pass on all other warnings."""
    lines: Counter[str] = Counter()
    mode, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

    def note(message: Warning | str, *details: Any, **named: Any) -> None:
        if str(message).startswith(_MESSAGE):
            lines[_place()] += 1
        else:
            show(message, *details, **named)

    # Not `catch_warnings`, which would undo the filters that a script sets during the fit.
    warnings.filterwarnings("always", _MESSAGE)
    filters = cast("list[Any]", warnings.filters)
    own = filters[0]
    warnings.showwarning = note
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("warn")
        yield lines
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        if warnings.showwarning is note:
            warnings.showwarning = show
        if own in filters:
            filters.remove(own)


def _place() -> str:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # `inspect.stack` reads the source of each frame
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_FILES_TO_SKIP) or frame.f_code.co_filename.endswith("warnings.py")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
