"""Statistics of the activations of each layer, and norms of the gradients and updates of each parameter."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor

from composer_dist import dist
from composer_dist.wrapping import canonical_name, unwrap_model
from composer_events.arguments import check_counts, check_text_lists, loaded, to_time
from composer_events.callback import Callback
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["ActivationMonitor", "OptimizerMonitor", "compute_kurtosis"]

_NORM = "l2_norm"
_GRADIENT = f"{_NORM}/grad"


class OptimizerMonitor(Callback):
    """Log the gradient norm of each parameter (`l2_norm/grad/<name>`) and of all (`l2_norm/grad/global`).

    Values stay on the accelerator until a logger reads them; the callback does not synchronize. For a sharded model,
    they are the norms of the unsharded gradients, which costs one collective per interval.

    Args:
        log_optimizer_metrics: Whether to also log the optimizer's own metrics, if it has
            `report_per_parameter_metrics`. `DecoupledAdamW` reports the norms of moments, parameters and updates.
        batch_log_interval: Interval in batches.

    Raises:
        ValueError: If the interval is not positive.

    Example:
        >>> monitor = OptimizerMonitor(batch_log_interval=10)
    """

    reads_gradients: ClassVar[bool] = True  # which DeepSpeed's engine drops before; `check_deepspeed_fits` asks for it

    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: int = 10) -> None:
        check_counts(batch_log_interval=batch_log_interval)
        self.log_optimizer_metrics = log_optimizer_metrics
        self.batch_log_interval = batch_log_interval

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the norms, every `batch_log_interval` batches."""
        if state.timestamp.num_batches % self.batch_log_interval:
            return
        named = state.model.named_parameters()
        parameters = {canonical_name(name): each for name, each in named if each.grad is not None}
        metrics: dict[str, Any] = {}
        if self.log_optimizer_metrics:
            for optimizer in state.optimizers:
                own = {id(each) for group in optimizer.param_groups for each in group["params"]}
                theirs = {name: each for name, each in parameters.items() if id(each) in own}
                metrics |= host_values(_optimizer_metrics(optimizer, theirs))
        gradients = {f"{_GRADIENT}/{name}": parameter.grad for name, parameter in parameters.items()}
        unknown = [name for name in gradients if name not in metrics]  # the optimizer may have reported some
        metrics |= zip(unknown, _whole_norms([gradients[name] for name in unknown]), strict=True)
        if gradients:
            metrics[f"{_GRADIENT}/global"] = _norm_of([metrics[name] for name in gradients])
        logger.log_metrics(metrics)


def _optimizer_metrics(optimizer: Any, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the optimizer's metrics of its parameters, reduced over ranks if parameters are sharded."""
    metrics: dict[str, Any] = {}
    if not callable(getattr(optimizer, "report_per_parameter_metrics", None)):
        return metrics
    for name, parameter in parameters.items():
        metrics = optimizer.report_per_parameter_metrics(parameter, name, metrics)
    # Unsharded metrics are equal on all ranks, and need no reduction.
    if not any(hasattr(parameter, "device_mesh") for parameter in parameters.values()):
        return metrics
    if callable(getattr(optimizer, "pre_reduce_metrics", None)):
        metrics = optimizer.pre_reduce_metrics(metrics)
        for name, parameter in parameters.items():
            # The sum over all ranks below would count each replica of a shard.
            copies = dist.get_world_size() / _num_shards(parameter)
            for key in metrics:
                if key.startswith(_NORM) and key.endswith(f"/{name}"):
                    metrics[key] = metrics[key] / copies
    if callable(getattr(optimizer, "dist_reduce_metrics", None)):
        metrics = optimizer.dist_reduce_metrics(metrics)
    return metrics


@torch.no_grad()
def _whole_norms(tensors: list[Any]) -> list[Any]:
    """Return the 2-norm of each tensor, over all its shards with one collective for each mesh.

    Norms on an accelerator are tensors, norms on the CPU are numbers.
    """
    if all(type(tensor) is Tensor for tensor in tensors) and len({(each.device, each.dtype) for each in tensors}) == 1:
        return list(_norms(tensors))  # fast path for unsharded gradients
    norms: dict[int, Any] = {}
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        mesh = None if type(tensor) is Tensor else getattr(tensor, "device_mesh", None)
        groups.setdefault((mesh, tensor.device, tensor.dtype), []).append(index)
    for (mesh, *_), indices in groups.items():
        shards = [tensors[index] for index in indices]
        if mesh is None:
            norms.update(zip(indices, _norms(shards), strict=True))
            continue
        # Reducing the stacked norms takes one collective, not one for each tensor.
        stacked: Any = torch.stack([torch.linalg.vector_norm(shard, dtype=_wide(shard)) for shard in shards])
        whole: Tensor = stacked.full_tensor()
        norms.update(zip(indices, whole.tolist() if whole.is_cpu else whole.unbind(), strict=True))
    return [norms[index] for index in range(len(tensors))]


def _norms(tensors: list[Tensor]) -> Sequence[Any]:
    # On an accelerator, one kernel for many tensors, as in torch's gradient clipping. The public
    # `torch.nn.utils.get_total_norm` only returns the total.
    norms: Sequence[Tensor] = torch._foreach_norm(tensors, dtype=_wide(tensors[0]))  # pyright: ignore[reportPrivateImportUsage]
    return [norm.item() for norm in norms] if tensors[0].is_cpu else norms


def _wide(tensor: Tensor) -> torch.dtype | None:
    # Norms can exceed 65,504, the maximum of float16, and bfloat16 has only 8 significant bits.
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def _norm_of(norms: list[Any]) -> Any:
    """Return the total norm, as a number if all norms are numbers."""
    if not any(isinstance(norm, Tensor) for norm in norms):
        return math.sqrt(sum(norm * norm for norm in norms))  # keeps NaN, where math.hypot returns inf for inf and NaN
    return torch.linalg.vector_norm(torch.stack([torch.as_tensor(norm) for norm in norms]))


def _num_shards(tensor: Any) -> int:
    """Return the number of distinct shards of a tensor; 1 if it is not sharded."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return 1
    parts = 1
    for dimension, placement in enumerate(tensor.placements):
        parts *= mesh.size(dimension) if placement.is_shard() else 1
    return parts


def host_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, with one-element CPU tensors replaced by numbers.

    Loggers store numbers without copies. Tensors on an accelerator are not read, since that would synchronize.

    >>> import torch
    >>> host_values({"norm": torch.tensor(1.5), "lr": 0.1})
    {'norm': 1.5, 'lr': 0.1}
    """
    on_host = {
        name: value for name, value in values.items() if type(value) is Tensor and value.is_cpu and value.numel() == 1
    }
    if len({(value.dtype, value.shape) for value in on_host.values()}) == 1:
        numbers = torch.stack(list(on_host.values())).flatten().tolist()  # faster than `item` of each tensor
    else:
        numbers = [value.item() for value in on_host.values()]
    return {**values, **dict(zip(on_host, numbers, strict=True))}


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
        if loaded("torch._dynamo") is not None:  # else nothing is compiled, and `set_stance` would import the compiler
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
