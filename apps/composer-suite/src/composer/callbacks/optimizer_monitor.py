"""Logging of gradient norms and of the optimizer's own metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_dist import dist
from composer_dist.wrapping import canonical_name
from composer_events.arguments import check_counts
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["OptimizerMonitor"]

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
            metrics = host_values(_optimizer_metrics(state.optimizers[0], parameters))
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
        norms.update(zip(indices, _host_values(stacked.full_tensor()), strict=True))
    return [norms[index] for index in range(len(tensors))]


def _norms(tensors: list[Tensor]) -> Sequence[Any]:
    # On an accelerator, one kernel for many tensors, as in torch's gradient clipping. The public
    # `torch.nn.utils.get_total_norm` only returns the total.
    norms: Sequence[Tensor] = torch._foreach_norm(tensors, dtype=_wide(tensors[0]))  # pyright: ignore[reportPrivateImportUsage]
    return [norm.item() for norm in norms] if tensors[0].is_cpu else norms


def _wide(tensor: Tensor) -> torch.dtype | None:
    # Norms can exceed 65,504, the maximum of float16, and bfloat16 has only 8 significant bits.
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def _host_values(numbers: Tensor) -> Sequence[Any]:
    return numbers.tolist() if numbers.is_cpu else numbers.unbind()


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
    on_host = {name: value for name, value in values.items() if _is_on_host(value)}
    if len({(value.dtype, value.shape) for value in on_host.values()}) == 1:
        numbers = torch.stack(list(on_host.values())).flatten().tolist()  # faster than `item` of each tensor
    else:
        numbers = [value.item() for value in on_host.values()]
    return {**values, **dict(zip(on_host, numbers, strict=True))}


def _is_on_host(value: Any) -> bool:
    return type(value) is Tensor and value.is_cpu and value.numel() == 1
