"""Data parallelism: each rank holds the whole model, and the gradients are averaged."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as tdist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_dist.collectives import cpu_group
from composer_dist.devices import Device
from composer_dist.strategy import SingleDevice, TNumber, unwrap_model
from composer_time import StringEnum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import Module

__all__ = [
    "BUCKET_BYTES",
    "average_gradients",
    "average_values",
    "broadcast_tensors",
    "sum_counts",
    "DDP",
    "DDPSyncStrategy",
    "ddp_sync_context",
    "prepare_ddp_module",
    "share_buffers",
]

_COMM_HOOKS = ("bf16_compress", "fp16_compress", "powersgd")
_NOTHING = nullcontext()  # reentrant and without state, so one serves every microbatch


class DDPSyncStrategy(StringEnum):
    """When the ranks average the gradients of a step that has several microbatches.

    - `SINGLE_AUTO_SYNC`: during the last microbatch's backward pass.
    - `MULTI_AUTO_SYNC`: during every microbatch's. It costs more, and serves models that use other parameters in one
      microbatch than in the next. All ranks must cut their batches into equally many microbatches.
    - `FORCED_SYNC`: after the last microbatch, outside of `DistributedDataParallel`. It serves models whose ranks use
      different parameters, without a search for unused ones.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"


def prepare_ddp_module(module: "Module", find_unused_parameters: bool) -> "Module":
    """Wrap a module in `DistributedDataParallel`. Every rank must call this; all get rank 0's weights.

    Args:
        module: On its device already.
        find_unused_parameters: Whether some parameters may be without gradient in some steps.

    Returns:
        The wrapped module, or the module itself if it has nothing to train.

    Raises:
        RuntimeError: If there is no process group.
    """
    if not (tdist.is_available() and tdist.is_initialized()):
        raise RuntimeError(
            "a model can be wrapped for several ranks only in a process group, and torch.distributed is not available "
            "or has not been initialized. Call initialize_dist() first, in processes started by the `composer` "
            "launcher or by torchrun."
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True)


def share_buffers(model: "Module") -> None:
    """Give every rank the buffers of rank 0, if the model is wrapped for DDP. Every rank must call this.

    Since the last forward pass of training each rank has its own, such as running statistics of its part of the batch,
    and a checkpoint has rank 0's. Before an evaluation this makes all ranks evaluate the same model, that of the
    checkpoint.

    Args:
        model: As `prepare_ddp_module` returned it. Nothing happens to any other.
    """
    if isinstance(model, DistributedDataParallel):
        broadcast_tensors(model.module.buffers(), model.process_group)


def ddp_sync_context(
    state: Any, is_final_microbatch: bool, sync_strategy: str | DDPSyncStrategy
) -> AbstractContextManager[Any]:
    """Return the context in which one microbatch runs forward and backward.

    Args:
        state: An object whose `model` is what `prepare_ddp_module` returned; any other model gets a context that does
            nothing.
        is_final_microbatch: Whether the gradients of the ranks must agree after it.
        sync_strategy: When they are averaged.

    Raises:
        ValueError: If there is no such strategy.
    """
    sync_strategy = DDPSyncStrategy(sync_strategy)
    model = state.model
    if not isinstance(model, DistributedDataParallel):
        return _NOTHING
    return _sync_context(model, is_final_microbatch, sync_strategy)


def _sync_context(
    model: DistributedDataParallel, is_final: bool, sync_strategy: DDPSyncStrategy
) -> AbstractContextManager[Any]:
    if sync_strategy is DDPSyncStrategy.MULTI_AUTO_SYNC:
        return _NOTHING
    if not is_final:
        return model.no_sync()
    return _NOTHING if sync_strategy is DDPSyncStrategy.SINGLE_AUTO_SYNC else _sync_afterwards(model)


@contextmanager
def _sync_afterwards(model: DistributedDataParallel) -> Iterator[None]:
    """Average the gradients on leaving, unless an error is the reason for it: then the other ranks must not wait."""
    with model.no_sync():
        yield
    average_gradients(model.parameters(), model.process_group)
    # Without a synchronised backward pass DDP would not broadcast the buffers before the next forward pass.
    model.require_forward_param_sync = True


class DDP(SingleDevice):
    """Every rank holds the whole model, computes on a part of the batch, and takes the same step.

    Each rank for itself does what a single device does. The gradients after the last microbatch of a step are the
    mean over the ranks. Buffers, such as BatchNorm's running statistics, are those of rank 0, broadcast before the
    first forward pass of a step. A model that has nothing to train is not wrapped.

    Args:
        device: This rank's device.
        sync_strategy: When gradients are averaged. By default `multi_auto_sync` with `find_unused_parameters`, else
            `single_auto_sync`.
        find_unused_parameters: Whether some parameters may be without gradient in some steps on some ranks.
        comm_hook: How gradients travel: `'bf16_compress'` or `'fp16_compress'` for half the bytes, `'powersgd'` for
            matrices of low rank (it needs NumPy). As they are when `None`.

    Raises:
        ValueError: If there is no such strategy or hook, or if the two exclude each other.
        ImportError: If the hook needs NumPy and it is not installed.

    Reference:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
        arXiv:2006.15704. Vogels et al., "PowerSGD", NeurIPS 2019, arXiv:1905.13727.
    """

    def __init__(
        self,
        device: Device,
        *,
        sync_strategy: str | DDPSyncStrategy | None = None,
        find_unused_parameters: bool = False,
        comm_hook: str | None = None,
    ) -> None:
        super().__init__(device)
        if sync_strategy is None:
            sync_strategy = "multi_auto_sync" if find_unused_parameters else "single_auto_sync"
        self.sync_strategy = DDPSyncStrategy(sync_strategy)
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook = comm_hook
        self._model: DistributedDataParallel | None = None
        self._postpones = False  # whether gradients wait for the end of an attempt
        _check_comm_hook(comm_hook, self.sync_strategy)

    @property
    def world_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # constant once there is a group
        """Over how many ranks the gradients are a mean."""
        return tdist.get_world_size()

    def prepare(self, model: "Module", optimizers: Sequence[Optimizer]) -> "tuple[Module, Sequence[Optimizer]]":
        """Move model and optimizers to the device, in place, and return the model wrapped. Every rank calls this.

        Raises:
            ValueError: If `forced_sync` is asked for and an embedding of the model has sparse gradients.
            RuntimeError: If there is no process group, or if the ranks' parameters have different shapes.
        """
        if self.sync_strategy is DDPSyncStrategy.FORCED_SYNC:
            _refuse_sparse_gradients(model)
        model, optimizers = super().prepare(model, optimizers)
        model = prepare_ddp_module(model, self.find_unused_parameters)
        if isinstance(model, DistributedDataParallel):
            self._model = model
            if self.comm_hook is not None:
                _register_comm_hook(model, self.comm_hook)
        return model, optimizers

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return the context in which one microbatch runs forward and backward."""
        if self._model is None:
            return _NOTHING
        if not sync or self._postpones:
            return self._model.no_sync()
        # Ranks with fewer microbatches would not be there for every one of `multi_auto_sync`.
        meet_once = not is_aligned and self.sync_strategy is DDPSyncStrategy.MULTI_AUTO_SYNC
        return _sync_context(self._model, is_last, DDPSyncStrategy.FORCED_SYNC if meet_once else self.sync_strategy)

    @contextmanager
    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> Iterator[None]:
        """Return the context around the microbatches of a step that any rank may have to give up, and all then repeat.

        The ranks meet at its begin, where rank 0 sends its buffers, if there are any, and at its end, where the
        gradients are averaged as with `forced_sync`. In between each computes for itself, so that the averaging does
        not overlap with the backward pass.

        Raises:
            ValueError: If there is a communication hook, which such an averaging goes past.
        """
        if self.comm_hook is not None:
            raise ValueError(
                f"comm_hook={self.comm_hook!r} does nothing in a step that may be repeated, which sends the gradients "
                "itself. Leave the hook out, or give the size of a microbatch as a number."
            )
        model = self._model
        if model is None or not torch.is_grad_enabled():
            yield
            check()
            return
        sends_buffers = model.require_forward_param_sync
        buffers = list(model.module.buffers())
        if sends_buffers and buffers:  # before the forward pass, in which DDP would do it, but a rank may be missing
            check()  # one may have given up already, between two evaluations of one step
            broadcast_tensors(buffers, model.process_group)
        model.require_forward_param_sync = False
        self._postpones = True
        try:
            yield
            check()
        except BaseException:
            model.require_forward_param_sync = sends_buffers  # the next attempt begins with what was there before
            raise
        finally:
            self._postpones = False
        if sync:
            average_gradients(model.parameters(), model.process_group)
            model.require_forward_param_sync = True

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Let an optimizer move the weights, by way of the scaler if one scaled the losses."""
        try:
            return super().step(optimizer, closure, scaler=scaler)
        except BaseException:
            if self._model is not None:  # whoever repeats the step begins before its first closure
                self._model.require_forward_param_sync = True
            raise

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return, for each of a few counts below 2**53, its sum over all ranks. Every rank calls this."""
        return sum_counts(values)

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean of each value over all ranks, by way of one collective that nobody waits for."""
        return average_values(values)

    def model_state_dict(self, model: "Module") -> dict[str, Any]:
        """Return the state dict of the model that was wrapped, which shares the weights' memory."""
        return unwrap_model(model).state_dict()

    def load_model_state_dict(
        self, model: "Module", state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load weights into the model that was wrapped, and return the names that were missing and not expected."""
        return super().load_model_state_dict(unwrap_model(model), state_dict, strict=strict)


def _check_comm_hook(name: str | None, sync_strategy: DDPSyncStrategy) -> None:
    if name is None:
        return
    if name not in _COMM_HOOKS:
        raise ValueError(
            f"comm_hook={name!r} is not a communication hook. Use one of {', '.join(_COMM_HOOKS)}, or None."
        )
    if sync_strategy is DDPSyncStrategy.FORCED_SYNC:
        raise ValueError(
            f"comm_hook={name!r} does nothing with sync_strategy='forced_sync', which sends the gradients itself. "
            "Choose 'single_auto_sync' or 'multi_auto_sync', or leave the hook out."
        )
    if name == "powersgd" and find_spec("numpy") is None:
        raise ImportError(
            "comm_hook='powersgd' needs the package 'numpy', which is not installed. It comes with the extra 'numpy': "
            "run `pip install 'composer-dist[numpy]'`.",
            name="numpy",
        )


def _register_comm_hook(model: DistributedDataParallel, name: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # slow, and seldom asked for

    if name == "bf16_compress":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "fp16_compress":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # needs NumPy

        model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)


def _refuse_sparse_gradients(model: "Module") -> None:
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"sync_strategy='forced_sync' averages dense gradients only, but the model's {name!r} has sparse ones. "
                "Make it with sparse=False, or choose 'single_auto_sync' or 'multi_auto_sync'."
            )


BUCKET_BYTES = 25 * 2**20
"""How many bytes of gradients travel together."""


def average_gradients(
    parameters: Iterable[torch.Tensor], group: "ProcessGroup | None" = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each gradient by its mean over the ranks, in place. Every rank of the group must call this.

    A parameter that a rank has no gradient for counts as zero there, and gets the mean. Where no rank has one, there
    is none afterwards. A rank waits for its device only if it has no gradient for some parameter.

    Args:
        parameters: The same on every rank, in the same order. Those that need no gradient are left out.
        group: The ranks to average over. All of them when `None`.
        bucket_bytes: About how many bytes travel in one collective.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for bucket in _buckets(trainable, bucket_bytes):
        _average_bucket(bucket, group)


def average_values(values: Mapping[str, torch.Tensor], group: "ProcessGroup | None" = None) -> dict[str, torch.Tensor]:
    """Return the mean of each value over the ranks, by way of one collective. Every rank of the group must call this.

    Nobody waits for the device. The names must be the same on every rank; their order does not matter.

    Args:
        values: Floating-point tensors on one device; they are not changed.
        group: The ranks to average over. All of them when `None`.
    """
    if not values:
        return {}
    names = sorted(values)
    flat = torch.cat([values[name].detach().reshape(-1) for name in names])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32)).div(tdist.get_world_size(group))
    tdist.all_reduce(flat, group=group)
    parts = flat.split([values[name].numel() for name in names])
    means = {
        name: part.view(values[name].shape).to(values[name].dtype) for name, part in zip(names, parts, strict=True)
    }
    return {name: means[name] for name in values}


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], group: "ProcessGroup | None" = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each tensor by that of the group's first rank, in place. Every rank of the group must call this.

    Args:
        tensors: The same shapes and dtypes on every rank, in the same order.
        group: The ranks that take part. All of them when `None`.
        bucket_bytes: About how many bytes travel in one collective.
    """
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        tdist.broadcast(flat, group_src=0, group=group)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def sum_counts(values: Sequence[TNumber], group: "ProcessGroup | None" = None) -> list[TNumber]:
    """Return the sum of each number over the ranks, by way of one collective between the hosts.

    Every rank of the group must call this. Integers are exact below 2**53.
    """
    totals = torch.tensor(values, dtype=torch.float64)
    tdist.all_reduce(totals, group=cpu_group(group))
    return [type(value)(total) for value, total in zip(values, totals.tolist(), strict=True)]


def _buckets(parameters: Iterable[torch.Tensor], size_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Cut the parameters into lists of one device and dtype each, by what all ranks know alike."""
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for parameter in parameters:
        key = (parameter.device, parameter.dtype)
        bucket, filled_bytes = open_buckets.pop(key, ([], 0))
        bucket.append(parameter)
        filled_bytes += parameter.nbytes
        if filled_bytes >= size_bytes:
            yield bucket
        else:
            open_buckets[key] = (bucket, filled_bytes)
    for bucket, _ in open_buckets.values():
        yield bucket


def _average_bucket(bucket: list[torch.Tensor], group: "ProcessGroup | None") -> None:
    """Average the gradients of a few parameters with one collective.

    Behind the gradients travels a number for each parameter, which is above 0 if any rank has a gradient for it.
    """
    numel = sum(parameter.numel() for parameter in bucket)
    flat = torch.zeros(numel + len(bucket), dtype=bucket[0].dtype, device=bucket[0].device)
    views = [
        view.view(parameter.shape)
        for view, parameter in zip(flat[:numel].split([p.numel() for p in bucket]), bucket, strict=True)
    ]
    is_used = flat[numel:].fill_(1)
    for index, (parameter, view) in enumerate(zip(bucket, views, strict=True)):
        if parameter.grad is None:
            is_used[index] = 0
        else:
            view.copy_(parameter.grad)
    flat.div_(tdist.get_world_size(group))  # before the sum, which could overflow in float16
    tdist.all_reduce(flat, group=group)
    for index, (parameter, view) in enumerate(zip(bucket, views, strict=True)):
        if parameter.grad is not None:
            parameter.grad.copy_(view)
        elif is_used[index] > 0:
            parameter.grad = view.clone()
