"""Statistics of the inputs and outputs of each layer."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from composer_dist.wrapping import unwrap_model
from composer_events.arguments import check_text_lists, to_time
from composer_events.callback import Callback
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["ActivationMonitor", "compute_kurtosis"]

_UNITS: Final = (TimeUnit.BATCH, TimeUnit.EPOCH)
_SELDOM_ENOUGH: Final = 10  # batches between logs, so that the cost is small
_STATISTICS: Final = ("l2_norm", "average", "max", "kurtosis")


class ActivationMonitor(Callback):
    """Log statistics of the activations of every module, in the first microbatch of every interval.

    They are logged as `activations/<statistic>/<module>_input.<i>` and `..._output.<i>`, for positional inputs and
    outputs with floating point or complex numbers. Statistics are computed along the last dim and averaged over all
    other dims. For complex numbers, absolute values are used.

    | statistic | meaning |
    |---|---|
    | `l2_norm` | the 2-norm |
    | `average` | the mean |
    | `max` | the largest value |
    | `kurtosis` | the fourth moment over the square of the second, 3 for a normal distribution |

    Values stay on the accelerator until a logger reads them. If a module is called several times, those of the last
    call are logged. Hooks are installed only for the logged forward passes, in which compiled modules run in eager
    mode.

    Args:
        interval: Interval between logs: a number of batches, or a time in batches or epochs.
        ignore_module_types: Substrings of the names of modules to leave out, such as `['dropout']`.
        only_log_wandb: Whether to log only to `WandBLogger`s, if there are any, since there are many values.
        whole_outputs: Whether to log a tensor output as one output. By default, each row along the first dim is logged
            separately, which gives as many values as there are samples.

    Raises:
        ValueError: If the interval has another unit, or is less than 1.

    Example:
        >>> monitor = ActivationMonitor(interval='100ba', ignore_module_types=['dropout'])
    """

    def __init__(
        self,
        interval: int | str | Time[int] = "25ba",
        ignore_module_types: list[str] | None = None,
        only_log_wandb: bool = True,
        *,
        whole_outputs: bool = False,
    ) -> None:
        check_text_lists(ignore_module_types=ignore_module_types)
        self.interval = to_time("interval", interval, TimeUnit.BATCH)
        if self.interval.unit not in _UNITS or int(self.interval) < 1:
            raise ValueError(f"interval={interval!r} must be batches or epochs, 1 or more, such as '25ba' or '1ep'.")
        if self.interval.unit is TimeUnit.BATCH and int(self.interval) < _SELDOM_ENOUGH:
            warnings.warn(
                f"interval={interval!r} logs statistics of every layer every {int(self.interval)} batches, which slows "
                f"training down. Give {_SELDOM_ENOUGH} batches or more.",
                stacklevel=2,
            )
        self.ignore_module_types = [] if ignore_module_types is None else ignore_module_types
        self.only_log_wandb = only_log_wandb
        self.whole_outputs = whole_outputs
        self._now = attrgetter("num_batches" if self.interval.unit is TimeUnit.BATCH else "num_epochs")
        self._last_logged: int | None = None
        self._is_watching = False
        self._handles: list[RemovableHandle] = []
        self._uncompiled = ExitStack()
        self._seen: dict[str, tuple[Tensor, int]] = {}  # by name of an input or output, and which row it is
        # By id, since tensors compare by element. A weak reference detects a reused id, the version an in-place change.
        self._measured: dict[tuple[int, bool], tuple[weakref.ref[Tensor], int, Tensor | None]] = {}

    def before_forward(self, state: State, logger: Logger) -> None:
        """Install the hooks, if logging is due."""
        now = self._now(state.timestamp)
        if now % self.interval.value or now == self._last_logged:
            return
        self._stop_watching()  # remove hooks left by a failed forward pass
        self._is_watching = True
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and `set_stance` would import the compiler
            self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in unwrap_model(state.model).named_modules():  # the same names with and without DDP
            if not any(part in name for part in self.ignore_module_types):
                self._handles.append(module.register_forward_hook(functools.partial(self._watch, name)))

    def after_forward(self, state: State, logger: Logger) -> None:
        """Log the statistics, and remove the hooks."""
        if not self._is_watching:
            return
        self._last_logged = self._now(state.timestamp)
        metrics = _by_name(self._seen)
        self._stop_watching()
        takers = logger.destinations if self.only_log_wandb else ()
        wandb = [place for place in takers if getattr(place, "shows_many_metrics", False)]
        step = state.timestamp.num_batches
        for destination in wandb:
            destination.log_metrics(metrics, step)
        if not wandb:
            logger.log_metrics(metrics, step)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Remove hooks left by a failed forward pass."""
        self._stop_watching()

    eval_start = predict_start = close = fit_start

    def _stop_watching(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._uncompiled.close()
        self._is_watching = False
        self._handles, self._seen, self._measured = [], {}, {}

    def _watch(self, name: str, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        with torch.no_grad():
            for suffix, tensor in _items(inputs, "_input"):
                self._measure(f"{name}{suffix}", tensor)
            if not isinstance(output, Tensor):
                for suffix, tensor in _items(output, "_output"):
                    self._measure(f"{name}{suffix}", tensor)
            elif self.whole_outputs or output.ndim == 0:
                self._measure(f"{name}_output.0", output)
            elif (statistics := self._statistics_of(output, as_rows=True)) is not None:
                self._seen |= {f"{name}_output.{row}": (statistics, row) for row in range(len(output))}

    def _measure(self, name: str, tensor: Tensor) -> None:
        if (statistics := self._statistics_of(tensor, as_rows=False)) is not None:
            self._seen[name] = statistics, 0

    def _statistics_of(self, tensor: Tensor, *, as_rows: bool) -> Tensor | None:
        """Return the statistics of a tensor, cached: the output of a module is often the input of the next."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None  # such tensors have no rows of equal length
        # `_version` counts in-place changes; it has no public equivalent, and inference tensors lack it.
        version = -1 if tensor.is_inference() else tensor._version
        known = self._measured.get((id(tensor), as_rows))
        if known is not None and known[0]() is tensor and known[1] == version != -1:
            return known[2]
        statistics = _statistics(tensor if as_rows else tensor[None])
        self._measured[id(tensor), as_rows] = weakref.ref(tensor), version, statistics
        return statistics


def compute_kurtosis(value: Tensor) -> Tensor:
    """Return the kurtosis along the last dim, averaged over all others: 3 for a normal distribution.

    Args:
        value: Shape `(..., n)`, floating point.

    Example:
        >>> compute_kurtosis(torch.tensor([[-1.0, 1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 4.0]]))
        tensor(1.6667)
    """
    return _kurtosis(value, value.mean(dim=-1, keepdim=True)).mean()


def _kurtosis(value: Tensor, mean: Tensor) -> Tensor:
    squares = (value - mean).square_()
    # The norm of the squares gives the sum of the fourth powers without a temporary tensor for them.
    ratio = torch.linalg.vector_norm(squares, dim=-1) / squares.sum(dim=-1)
    return ratio.square_() * squares.shape[-1]


def _statistics(tensor: Tensor) -> Tensor | None:
    """Return the `_STATISTICS` of each row, shape `(rows, 4)`, in one pass over all of them."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    tensor = tensor.abs() if tensor.is_complex() else tensor
    tensor = tensor.float() if tensor.element_size() < 4 else tensor  # fourth powers overflow 16 bits
    rows = tensor.reshape(len(tensor), -1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    average = rows.mean(dim=-1, keepdim=True)
    along_last = (
        torch.linalg.vector_norm(rows, dim=-1),
        average.squeeze(-1),
        rows.amax(dim=-1),
        _kurtosis(rows, average),
    )
    return torch.stack(along_last, dim=1).mean(dim=-1)


def _by_name(seen: Mapping[str, tuple[Tensor, int]]) -> dict[str, Any]:
    """Return the statistics by logged name: numbers on the CPU, tensors on a device, to avoid a synchronization."""
    tensors = {id(statistics): statistics for statistics, _ in seen.values()}
    values: dict[int, Sequence[Any]] = {
        key: each.tolist() if each.is_cpu else [row.unbind() for row in each.unbind()] for key, each in tensors.items()
    }
    return {
        f"activations/{statistic}/{name}": value
        for name, (statistics, row) in seen.items()
        for statistic, value in zip(_STATISTICS, values[id(statistics)][row], strict=True)
    }


def _items(values: Any, suffix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among inputs or outputs, with the suffixes of their names."""
    if not isinstance(values, Iterable) or isinstance(values, Iterator):  # reading an iterator would exhaust it
        return
    for index, item in enumerate(values):
        if isinstance(item, str):  # a key of a dict-like output
            item = values[item] if isinstance(values, Mapping) else None
        yield from _nested(item, f"{suffix}.{index}")


def _nested(item: Any, suffix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(item, Tensor):
        yield suffix, item
    elif isinstance(item, Sequence) and not isinstance(item, str):
        for index, part in enumerate(item):
            yield from _nested(part, f"{suffix}_{index}")
