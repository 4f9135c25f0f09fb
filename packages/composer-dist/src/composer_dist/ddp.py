"""Data parallel training: each rank holds the whole model, and gradients are averaged over the ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as tdist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_dist.collectives import cpu_group, group_for
from composer_dist.devices import Device
from composer_dist.progress import waiting
from composer_dist.strategy import SingleDevice, TNumber
from composer_dist.wrapping import unwrap_model
from composer_time import StringEnum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import Module

__all__ = [
    "BUCKET_BYTES",
    "average_gradients",
    "average_values",
    "broadcast_tensors",
    "start_gather",
    "start_sum",
    "sum_counts",
    "DDP",
    "DDPSyncStrategy",
    "ddp_sync_context",
    "prepare_ddp_module",
    "share_buffers",
]

_COMM_HOOKS = ("bf16_compress", "fp16_compress", "powersgd")
_NOTHING = nullcontext()  # stateless and reentrant, so one instance serves every microbatch


class DDPSyncStrategy(StringEnum):
    """The points of a step with several microbatches at which gradients are averaged over the ranks.

    - `SINGLE_AUTO_SYNC`: in the last microbatch's backward pass.
    - `MULTI_AUTO_SYNC`: in every microbatch's backward pass. It costs more, and suits models that use different
      parameters in each microbatch. All ranks must split their batches into equally many microbatches.
    - `FORCED_SYNC`: after the last microbatch, outside of `DistributedDataParallel`. It suits models that use different
      parameters on each rank, without a search for unused ones.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"


def prepare_ddp_module(module: "Module", find_unused_parameters: bool) -> "Module":
    """Wrap a module in `DistributedDataParallel`. Every rank must call this; all ranks get rank 0's weights.

    Args:
        module: A module that is on its device already.
        find_unused_parameters: Whether some parameters may have no gradient in some steps.

    Returns:
        The wrapped module, or the module itself if it has no trainable parameters.

    Raises:
        RuntimeError: Without a process group.
    """
    if not (tdist.is_available() and tdist.is_initialized()):
        raise RuntimeError(
            "a model can be wrapped for several ranks only in a process group, and torch.distributed is not available "
            "or has not been initialized. Call initialize_dist() first, in processes started by the `composer` "
            "launcher or by torchrun."
        )
    # DistributedDataParallel raises on a module without trainable parameters.
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    # gradient_as_bucket_view saves the memory of one copy of all gradients.
    return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True)


def share_buffers(model: "Module") -> None:
    """Broadcast rank 0's buffers if the model is wrapped for DDP. Every rank must call this.

    After a training step each rank has its own buffers, such as running statistics of its part of the batch, and a
    checkpoint holds rank 0's. Call this before an evaluation, so that all ranks evaluate the model of the checkpoint.

    Args:
        model: The result of `prepare_ddp_module`. Other models are left unchanged.
    """
    if isinstance(model, DistributedDataParallel):
        broadcast_tensors(model.module.buffers(), model.process_group)


def ddp_sync_context(
    state: Any, is_final_microbatch: bool, sync_strategy: str | DDPSyncStrategy
) -> AbstractContextManager[Any]:
    """Return the context manager for the forward and backward pass of one microbatch.

    Args:
        state: An object with an attribute `model`. If that is not a wrapped model, the context does nothing.
        is_final_microbatch: Whether this is the last microbatch of a step, after which gradients must be averaged.
        sync_strategy: The points at which gradients are averaged.

    Raises:
        ValueError: If `sync_strategy` is unknown.
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
    """Average the gradients on leaving without an error; after one, the other ranks may not reach the collective."""
    with model.no_sync():
        yield
    average_gradients(model.parameters(), model.process_group)
    # Without a synchronized backward pass DDP would skip the buffer broadcast of the next forward pass.
    model.require_forward_param_sync = True


class DDP(SingleDevice):
    """Data parallel training with `DistributedDataParallel`: every rank holds the whole model and takes the same step.

    Each rank computes on its part of the batch. After the last microbatch of a step, gradients are the mean over the
    ranks. Buffers, such as BatchNorm's running statistics, are broadcast from rank 0 before the first forward pass of a
    step. A model without trainable parameters is not wrapped.

    Args:
        device: This rank's device.
        sync_strategy: The points at which gradients are averaged. By default `multi_auto_sync` with
            `find_unused_parameters`, else `single_auto_sync`.
        find_unused_parameters: Whether some parameters may have no gradient in some steps on some ranks.
        comm_hook: Compression of gradients on the wire: `'bf16_compress'` or `'fp16_compress'` for half the bytes,
            `'powersgd'` for low-rank matrices (it needs NumPy). No compression when `None`.

    Raises:
        ValueError: If the strategy or the hook is unknown, or if the two exclude each other.

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
        self._postpones = False  # True inside `attempt`, which averages gradients at its end
        _check_comm_hook(comm_hook, self.sync_strategy)

    @property
    def world_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # constant once there is a group
        """The number of ranks that gradients are averaged over."""
        return tdist.get_world_size()

    def prepare(self, model: "Module", optimizers: Sequence[Optimizer]) -> "tuple[Module, Sequence[Optimizer]]":
        """Move model and optimizers to the device, in place, and return the wrapped model. Every rank must call this.

        Raises:
            ValueError: If `forced_sync` is set and an embedding of the model has sparse gradients.
            RuntimeError: Without a process group, or if the ranks' parameters have different shapes.
        """
        if self.sync_strategy is DDPSyncStrategy.FORCED_SYNC:
            for name, module in model.named_modules():
                if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
                    raise ValueError(
                        f"sync_strategy='forced_sync' averages dense gradients only, but the model's {name!r} has "
                        "sparse ones. Make it with sparse=False, or choose 'single_auto_sync' or 'multi_auto_sync'."
                    )
        model, optimizers = super().prepare(model, optimizers)
        model = prepare_ddp_module(model, self.find_unused_parameters)
        if isinstance(model, DistributedDataParallel):
            self._model = model
            if self.comm_hook is not None:
                _register_comm_hook(model, self.comm_hook)
        return model, optimizers

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return the context manager for the forward and backward pass of one microbatch."""
        if self._model is None:
            return _NOTHING
        if not sync or self._postpones:
            return self._model.no_sync()
        # With unequal numbers of microbatches, `multi_auto_sync` would wait for ranks that have finished.
        meet_once = not is_aligned and self.sync_strategy is DDPSyncStrategy.MULTI_AUTO_SYNC
        return _sync_context(self._model, is_last, DDPSyncStrategy.FORCED_SYNC if meet_once else self.sync_strategy)

    @contextmanager
    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> Iterator[None]:
        """Return the context manager for the microbatches of a step that all ranks repeat if any rank fails.

        Ranks synchronize at its start, where rank 0 broadcasts its buffers, if any, and at its end, where gradients are
        averaged as with `forced_sync`. In between no rank depends on another, so the averaging does not overlap with
        the backward pass.

        Raises:
            ValueError: If a communication hook is set, which this averaging bypasses.
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
        if sends_buffers and buffers:  # DDP's own broadcast in the forward pass would hang if a rank fails
            check()  # a rank may have failed between two evaluations of one step
            broadcast_tensors(buffers, model.process_group)
        model.require_forward_param_sync = False
        self._postpones = True
        try:
            yield
            check()
        except BaseException:
            model.require_forward_param_sync = sends_buffers  # the next attempt starts from the same state
            raise
        finally:
            self._postpones = False
        if sync:
            average_gradients(model.parameters(), model.process_group)
            model.require_forward_param_sync = True

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Take an optimizer step, through the gradient scaler if one scaled the losses."""
        try:
            return super().step(optimizer, closure, scaler=scaler)
        except BaseException:
            if self._model is not None:  # a repeated step starts before its first closure
                self._model.require_forward_param_sync = True
            raise

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return the sum over all ranks of each of a few counts below 2**53. Every rank must call this."""
        return sum_counts(values)

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean of each value over all ranks, without a device synchronization. Every rank must call this."""
        return average_values(values)

    def model_state_dict(self, model: "Module") -> dict[str, Any]:
        """Return the state dict of the unwrapped model, which shares the weights' memory."""
        return unwrap_model(model).state_dict()

    def load_model_state_dict(
        self, model: "Module", state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load weights into the unwrapped model, and return the missing and the unexpected names."""
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


def _register_comm_hook(model: DistributedDataParallel, name: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # slow to import and rarely needed

    if name == "bf16_compress":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "fp16_compress":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # imports NumPy

        model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)


BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients per collective."""


def average_gradients(
    parameters: Iterable[torch.Tensor], group: "ProcessGroup | None" = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each gradient by its mean over the ranks, in place. Every rank of the group must call this.

    A missing gradient counts as zero and is replaced by the mean; if it is missing on every rank, it stays missing.
    Only a rank with missing gradients synchronizes with its device, once per bucket.

    Args:
        parameters: The same parameters in the same order on every rank. Those without `requires_grad` are skipped.
        group: The ranks to average over. All of them when `None`.
        bucket_bytes: Approximate number of bytes per collective.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for bucket in _buckets(trainable, bucket_bytes):
        _average_bucket(bucket, group)


def average_values(values: Mapping[str, torch.Tensor], group: "ProcessGroup | None" = None) -> dict[str, torch.Tensor]:
    """Return the mean of each value over the ranks, with one collective. Every rank of the group must call this.

    The device is not synchronized. Names must be the same on every rank, in any order.

    Args:
        values: Floating-point tensors on one device; left unchanged.
        group: The ranks to average over. All of them when `None`.
    """
    if not values:
        return {}
    names = sorted(values)  # ranks may have recorded the values in different orders
    flat = torch.cat([values[name].detach().reshape(-1) for name in names])
    # Divided before the sum, and in float32 at least, so that half precision cannot overflow.
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32)).div(tdist.get_world_size(group))
    with waiting:
        tdist.all_reduce(flat, group=group_for(flat, group))
    parts = flat.split([values[name].numel() for name in names])
    means = {
        name: part.view(values[name].shape).to(values[name].dtype) for name, part in zip(names, parts, strict=True)
    }
    return {name: means[name] for name in values}


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], group: "ProcessGroup | None" = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each tensor with that of the group's first rank, in place. Every rank of the group must call this.

    Args:
        tensors: Tensors of the same shapes and dtypes on every rank, in the same order.
        group: The ranks that take part. All of them when `None`.
        bucket_bytes: Approximate number of bytes per collective.
    """
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        with waiting:
            tdist.broadcast(flat, group_src=0, group=group_for(flat, group))
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def sum_counts(values: Sequence[TNumber], group: "ProcessGroup | None" = None) -> list[TNumber]:
    """Return the sum of each number over the ranks, with one collective on the CPU.

    Every rank of the group must call this. Integers are exact below 2**53.
    """
    return start_sum(values, group)()


def start_sum(values: Sequence[TNumber], group: "ProcessGroup | None" = None) -> Callable[[], list[TNumber]]:
    """Start the collective of `sum_counts`, and return a function that waits for its result.

    Every rank of the group must call this, but need not call the function.
    """
    totals = torch.tensor(values, dtype=torch.float64)
    work = tdist.all_reduce(totals, group=cpu_group(group), async_op=True)

    def finish() -> list[TNumber]:
        if work is not None:
            with waiting:
                work.wait()
        return [type(value)(total) for value, total in zip(values, totals.tolist(), strict=True)]

    return finish


_ALIGNMENT = 16  # bytes; the largest element, complex128


def start_gather(
    tensors: Sequence[torch.Tensor], group: "ProcessGroup | None" = None
) -> Callable[[], list[torch.Tensor]]:
    """Start to gather tensors from all ranks, and return a function that waits for them.

    The tensors of a device, of any shapes and dtypes, travel in one collective. They may change as soon as this
    returns. Every rank of the group must call this, but need not call the function.

    Args:
        tensors: As many on every rank, of the same shapes and dtypes, on devices of the same types.
        group: The ranks that take part. All of them when `None`.

    Returns:
        A function that returns, for each tensor, one with an additional first dim for the rank. It does not wait for
        a GPU.
    """
    gathered: list[torch.Tensor] = [tensor[None] for tensor in tensors]  # each is replaced below
    works: list[Any] = []
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places_by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.device == device:
                places_by_dtype.setdefault(tensor.dtype, []).append(place)
        # The largest elements first, so that those of each dtype are aligned; the order is the same on all ranks.
        dtypes = sorted(places_by_dtype, key=lambda dtype: (-dtype.itemsize, str(dtype)))
        parts = [torch.cat([tensors[place].detach().reshape(-1) for place in places_by_dtype[each]]) for each in dtypes]
        in_bytes = [part.view(torch.uint8) for part in parts]
        num_bytes = sum(part.numel() for part in in_bytes)
        flat = torch.cat([*in_bytes, in_bytes[0].new_empty(-num_bytes % _ALIGNMENT)])
        whole = flat.new_empty(tdist.get_world_size(group) * flat.numel())
        own_group = group_for(flat, group)
        works.append(tdist.all_gather_into_tensor(whole, flat, group=own_group, async_op=True))
        rows = whole.view(-1, flat.numel())[:, :num_bytes].split([part.numel() for part in in_bytes], dim=1)
        for dtype, columns in zip(dtypes, rows, strict=True):
            _split_over(columns.view(dtype), tensors, places_by_dtype[dtype], gathered)

    def finish() -> list[torch.Tensor]:
        with waiting:
            for work in works:
                work.wait()
        return gathered

    return finish


def _split_over(
    rows: torch.Tensor, tensors: Sequence[torch.Tensor], places: Sequence[int], gathered: list[torch.Tensor]
) -> None:
    shapes = [tensors[place].shape for place in places]
    for place, shape, values in zip(places, shapes, rows.split([each.numel() for each in shapes], dim=1), strict=True):
        gathered[place] = values.unflatten(1, shape) if len(shape) > 1 else values if shape else values[:, 0]


def _buckets(parameters: Iterable[torch.Tensor], size_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Split the parameters into lists of one device and dtype, by facts that are equal on all ranks."""
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

    Appends one number per parameter to the gradients: after the sum it is above 0 if any rank has a gradient for it.
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
    with waiting:
        tdist.all_reduce(flat, group=group)
    # Read from the device at once, and only where a gradient is missing.
    counts = is_used.tolist() if any(parameter.grad is None for parameter in bucket) else [0.0] * len(bucket)
    for parameter, view, count in zip(bucket, views, counts, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(view)
        elif count > 0:
            parameter.grad = view.clone()
