"""How a model is spread over devices: the one thing of a training loop that knows of other ranks."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from composer_dist._fast_optimizer import unwatched_step, zero_grad
from composer_dist.devices import Device

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = [
    "Strategy",
    "SingleDevice",
    "canonical_name",
    "is_model_ddp",
    "is_model_deepspeed",
    "is_model_fsdp",
    "is_model_fsdp2",
    "unwrap_model",
]

TNumber = TypeVar("TNumber", int, float)
_NOTHING = nullcontext()  # reentrant and without state, so one serves every microbatch


@runtime_checkable
class Strategy(Protocol):
    """What a training loop asks of the way in which a model is spread.

    A loop prepares once, then runs each step in this order, and never asks which strategy it holds:

        model, optimizers = strategy.prepare(model, optimizers)
        for batch in loader:
            for optimizer in optimizers:
                strategy.zero_grad(optimizer)
            for index, microbatch in enumerate(microbatches):
                microbatch = strategy.prepare_batch(microbatch)
                with strategy.microbatch(is_last=index == len(microbatches) - 1):
                    strategy.backward(loss_of(model, microbatch) * share_of(microbatch))
            strategy.clip_grad_norm(model.parameters(), 1.0)
            for optimizer in optimizers:
                strategy.step(optimizer)

    What each method owes to the loop: after the last microbatch of a step the gradients are the mean over all ranks,
    norms are those of the whole gradient, and state dicts have the names of the model as it was before `prepare`.

    Attributes:
        world_size: Over how many ranks the gradients are a mean. Where the ranks' batches weigh differently, the loop
            gives each microbatch the weight `its size * world_size / strategy.sum([size of the rank's batch])`.
        has_own_precision: Whether the model that `prepare` returns computes in the precision of the run by itself, so
            that the loop needs neither autocast nor a `GradScaler`.
        prepares_before_load: Whether a checkpoint is loaded into the model that `prepare` returns. Where it is not,
            what a checkpoint says about the model's layers may still change them.
        meets_in_forward: Whether the ranks meet in each forward pass of the model, also in an evaluation, so that
            every rank must run as many of them as the others.
    """

    @property
    def world_size(self) -> int:
        """Over how many ranks the gradients are a mean."""
        ...

    @property
    def has_own_precision(self) -> bool:
        """Whether the prepared model needs neither autocast nor a `GradScaler` around it."""
        ...

    @property
    def prepares_before_load(self) -> bool:
        """Whether a checkpoint is loaded into the model that `prepare` returns."""
        ...

    @property
    def meets_in_forward(self) -> bool:
        """Whether every rank must run as many forward passes as the others."""
        ...

    def place(self, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Put model and optimizers where they may wait for `prepare`, in place: other things may change them yet."""
        ...

    def prepare(
        self, model: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[torch.nn.Module, Sequence[Optimizer]]:
        """Return model and optimizers ready to train, on their devices and perhaps wrapped. Every rank calls this.

        The loop uses what is returned from here on. The optimizers go on to own the parameters of the model returned.
        """
        ...

    def prepare_batch(self, batch: Any) -> Any:
        """Return a batch, which is on the device, in the dtypes that the model computes with."""
        ...

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return the context in which one microbatch runs forward and backward.

        Args:
            is_last: Whether this is the step's last microbatch, after which gradients must agree between the ranks.
                Before it, a strategy may save the communication.
            sync: Whether they must agree at all. An optimizer that looks at a batch several times may want each rank's
                own gradients first.
            is_aligned: Whether every rank has as many microbatches in this step, so that they may meet in each.
        """
        ...

    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> AbstractContextManager[Any]:
        """Return the context around the microbatches of a step that any rank may have to give up, and all then repeat.

        A rank that leaves it by an error must not keep the others waiting for it. So in this context the ranks do not
        meet without having called `check` before, equally often on all of them; a rank that fails calls it once in its
        handler instead, and then it raises on all the others. On leaving without an error, every rank calls `check`
        a last time before the gradients are made to agree. After an error the model may be run again as if it had not
        been run; what is left of gradients is the loop's to drop.

        An evaluation, which has no gradients (`torch.no_grad`), uses it in the same way.

        Args:
            check: Raises if any rank has failed. Every rank must call it equally often.
            sync: Whether the gradients must agree at all; see `microbatch`.

        Raises:
            ValueError: If this strategy cannot repeat a step.
        """
        ...

    def backward(self, loss: torch.Tensor, *, create_graph: bool = False) -> None:
        """Add the gradients of a loss, which already has its weight within the batch, to those of the parameters.

        Args:
            loss: A scalar.
            create_graph: Keep a graph of the gradients themselves, for methods that differentiate twice.
        """
        ...

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients, in place, so that their joint norm is at most `max_norm`.

        Returns:
            The norm before, over all ranks' parts, left on its device so that nobody waits for it.
        """
        ...

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Let an optimizer move the weights.

        Args:
            optimizer: One that `prepare` returned.
            closure: Computes loss and gradients anew, for optimizers that want several looks at a batch.
            scaler: What scaled the losses, which skips the step where a gradient overflowed.

        Returns:
            What the closure returned, if there was one and it was called.
        """
        ...

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters."""
        ...

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return, for each of a few counts on the host, its sum over all ranks. Every rank calls this."""
        ...

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return each value's mean over all ranks, left on its device. Every rank calls this, with the same keys."""
        ...

    def model_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the weights under the names that the model had before `prepare`."""
        ...

    def load_model_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load such weights, in place, and return the names that were missing and those that were not expected.

        Raises:
            RuntimeError: If `strict` and there are any such names, or if a shape does not fit.
        """
        ...

    def optimizer_state_dict(self, model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, whole, as the optimizer of an unwrapped model has it."""
        ...

    def load_optimizer_state_dict(
        self, model: torch.nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load such a state, in place."""
        ...


class SingleDevice:
    """One process, one device: the whole model where it computes.

    Args:
        device: Where the model goes.

    Example:
        >>> from composer_dist import get_device
        >>> strategy = SingleDevice(get_device("cpu"))
        >>> layer = torch.nn.Linear(2, 1)
        >>> model, optimizers = strategy.prepare(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)])
        >>> with strategy.microbatch(is_last=True):
        ...     strategy.backward(model(torch.ones(3, 2)).mean())
        >>> model.weight.grad
        tensor([[1., 1.]])
    """

    world_size = 1
    has_own_precision = False
    prepares_before_load = False
    meets_in_forward = False

    def __init__(self, device: Device) -> None:
        self.device = device

    def place(self, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Move the model and the optimizers' states to the device, in place.

        Raises:
            ValueError: If the model has weights without values.
        """
        _refuse_meta(model, self.device)
        self.device.module_to_device(model)
        for optimizer in optimizers:
            self.device.optimizer_to_device(optimizer)

    def prepare(
        self, model: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[torch.nn.Module, Sequence[Optimizer]]:
        """Move the model and the optimizers' states to the device, in place, and return them."""
        self.place(model, optimizers)
        return model, optimizers

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch as it is."""
        return batch

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return a context that does nothing, the same one each time: there is nobody to synchronise with."""
        return _NOTHING

    @contextmanager
    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> Iterator[None]:
        """Return a context that calls `check` at its end: nobody waits for this rank."""
        yield
        check()

    def backward(self, loss: torch.Tensor, *, create_graph: bool = False) -> None:
        """Add the gradients of a loss to those of the parameters."""
        loss.backward(create_graph=create_graph)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients, in place, to a joint norm of at most `max_norm`, and return the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Let an optimizer move the weights, by way of the scaler if one scaled the losses."""
        step = unwatched_step(optimizer) if scaler is None else partial(scaler.step, optimizer)
        return step() if closure is None else step(closure=closure)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters."""
        zero_grad(optimizer)

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return the counts as they are."""
        return values

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the values as they are."""
        return dict(values)

    def model_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the model's own state dict, which shares the weights' memory."""
        return model.state_dict()

    def load_model_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load weights, in place, and return the names that were missing and those that were not expected."""
        keys = model.load_state_dict(state_dict, strict=strict)
        return keys.missing_keys, keys.unexpected_keys

    def optimizer_state_dict(self, model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's own state dict, which shares the states' memory."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(
        self, model: torch.nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load an optimizer's state, in place."""
        optimizer.load_state_dict(dict(state_dict))


def _refuse_meta(model: torch.nn.Module, device: Device) -> None:
    names = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if names and device.torch_device.type != "meta":
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"the model's {', '.join(map(repr, names[:3]))}{more} are on the meta device, where they have no values to "
            "train. Build the model on a real device, or call model.to_empty(device='cpu') and initialize it."
        )


# Under which torch.compile, activation checkpointing and FSDP1 keep the module that they wrap. DDP's "module" is not
# here, since models have attributes of that name themselves.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def is_model_ddp(model: object) -> bool:
    """Answer whether the model is a `DistributedDataParallel`.

    Only the outermost wrapper counts: a model that was compiled after it was wrapped is not one.

    Example:
        >>> import torch
        >>> is_model_ddp(torch.nn.Linear(2, 1))
        False
    """
    from torch.nn.parallel import DistributedDataParallel  # slow: torch, which the rest of the module does not need

    return isinstance(model, DistributedDataParallel)


def is_model_deepspeed(model: object) -> bool:
    """Answer whether the model is DeepSpeed's engine.

    DeepSpeed is not imported for it: who has not loaded it has no engine.

    Example:
        >>> import torch
        >>> is_model_deepspeed(torch.nn.Linear(2, 1))
        False
    """
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def is_model_fsdp(model: object) -> bool:
    """Answer whether the model, or one of its direct children, is a `FullyShardedDataParallel` (FSDP version 1).

    Example:
        >>> import torch
        >>> is_model_fsdp(torch.nn.Linear(2, 1))
        False
    """
    return _is_or_has(model, "FullyShardedDataParallel")


def is_model_fsdp2(model: object) -> bool:
    """Answer whether the model, or one of its direct children, was given to `fully_shard` (FSDP version 2).

    Example:
        >>> import torch
        >>> is_model_fsdp2(torch.nn.Linear(2, 1))
        False
    """
    return _is_or_has(model, "FSDPModule")


def unwrap_model(model: "Module") -> "Module":
    """Return the model inside DDP, `DataParallel`, DeepSpeed's engine and `torch.compile`, in whatever order.

    What `fully_shard` shards is no wrapper, and stays the model that it is.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> unwrap_model(torch.compile(layer)) is layer
        True
    """
    from torch.nn.parallel import DataParallel  # as above

    while True:
        if is_model_ddp(model) or isinstance(model, DataParallel) or is_model_deepspeed(model):
            model = model.get_submodule("module")
        elif getattr(model, "_orig_mod", None) is not None:  # where `torch.compile` keeps it
            model = model.get_submodule("_orig_mod")
        else:
            return model


def canonical_name(name: str) -> str:
    """Return the name that a parameter, buffer or module has in a model without wrappers inside it.

    Args:
        name: Its name now.

    Example:
        >>> canonical_name("blocks.0._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


def _is_or_has(model: object, wrapper: str) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # slow to import, and who has not done so has sharded nothing
        return False
    children: Any = getattr(model, "children", tuple)
    return any(isinstance(part, getattr(fsdp, wrapper)) for part in (model, *children()))
