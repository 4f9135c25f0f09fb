"""The interface of a distributed strategy, its single-device implementation, and tests for wrapped models."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.amp.grad_scaler import GradScaler
from torch.autograd import profiler
from torch.optim import Optimizer

# PyTorch has no public way to tell whether optimizer hooks or a profiler are active.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from composer_dist.devices import Device

__all__ = ["Strategy", "SingleDevice"]

TNumber = TypeVar("TNumber", int, float)
_ZERO_GRAD = Optimizer.zero_grad  # kept to notice a replaced method
_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__  # shared by every wrapped `step`
_NOTHING = nullcontext()  # stateless and reentrant, so one instance serves every microbatch


@runtime_checkable
class Strategy(Protocol):
    """The interface between a training loop and a model that may be distributed.

    A loop calls `prepare` once, then runs each step in this order, whichever strategy it has:

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

    Strategies guarantee that after the last microbatch of a step gradients are the mean over all ranks, that norms are
    those of the whole gradient, and that state dicts have the names of the model before `prepare`.

    Attributes:
        world_size: Number of ranks that gradients are averaged over. If the ranks' batches differ in size, the loop
            weighs each microbatch by `its size * world_size / strategy.sum([size of the rank's batch])`.
        has_own_precision: Whether the prepared model applies the run's precision itself, so that the loop uses neither
            autocast nor a `GradScaler`.
        prepares_before_load: Whether checkpoints are loaded into the prepared model. If not, a checkpoint may still
            change the model's layers before `prepare`.
        meets_in_forward: Whether each forward pass has collectives, also in an evaluation, so that all ranks must run
            equally many.
    """

    @property
    def world_size(self) -> int:
        """The number of ranks that gradients are averaged over."""
        ...

    @property
    def has_own_precision(self) -> bool:
        """Return whether the prepared model needs neither autocast nor a `GradScaler`."""
        ...

    @property
    def prepares_before_load(self) -> bool:
        """Return whether checkpoints are loaded into the prepared model."""
        ...

    @property
    def meets_in_forward(self) -> bool:
        """Return whether all ranks must run equally many forward passes."""
        ...

    def place(self, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Place model and optimizers before `prepare`, in place, while the model may still change."""
        ...

    def prepare(
        self, model: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[torch.nn.Module, Sequence[Optimizer]]:
        """Return model and optimizers ready to train, on their devices and possibly wrapped. Every rank must call this.

        The loop uses the returned objects only. The optimizers own the parameters of the returned model.
        """
        ...

    def prepare_batch(self, batch: Any) -> Any:
        """Return a batch, which is on the device already, in the dtypes of the model's computation."""
        ...

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return the context manager for the forward and backward pass of one microbatch.

        Args:
            is_last: Whether this is the step's last microbatch, after which gradients must agree between the ranks. A
                strategy may save the communication of earlier ones.
            sync: Whether gradients must agree at all. An optimizer that evaluates a batch several times may need each
                rank's own gradients first.
            is_aligned: Whether every rank has as many microbatches in this step, so that each may have collectives.
        """
        ...

    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> AbstractContextManager[Any]:
        """Return the context manager for the microbatches of a step that all ranks repeat if any rank fails.

        A failing rank must not leave the others in a collective. Inside the context, ranks therefore call `check`
        before each collective, equally often on all ranks. A failing rank calls it once in its handler instead, and
        `check` then raises on all other ranks. On leaving without an error, every rank calls `check` once more before
        gradients are synchronized. After an error the model may run again as if the attempt had not happened; the loop
        drops remaining gradients.

        An evaluation, which has no gradients (`torch.no_grad`), uses it in the same way.

        Args:
            check: Raises if any rank has failed. Every rank must call it equally often.
            sync: Whether gradients must agree at all; see `microbatch`.

        Raises:
            ValueError: If this strategy cannot repeat a step.
        """
        ...

    def backward(self, loss: torch.Tensor, *, create_graph: bool = False) -> None:
        """Accumulate the gradients of a loss that already has its weight within the batch.

        Args:
            loss: A scalar.
            create_graph: Whether to keep the graph of the gradients, for methods that differentiate twice.
        """
        ...

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients, in place, so that their total norm is at most `max_norm`.

        Returns:
            The total norm before clipping, over all ranks, as a tensor on the device to avoid a synchronization.
        """
        ...

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Take an optimizer step.

        Args:
            optimizer: One that `prepare` returned.
            closure: A function that recomputes loss and gradients, for optimizers that evaluate a batch several times.
            scaler: The scaler of the losses, which skips the step if a gradient overflowed.

        Returns:
            The closure's result, if it was called.
        """
        ...

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters."""
        ...

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return the sum over all ranks of each of a few counts on the host. Every rank must call this."""
        ...

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return each value's mean over all ranks, on its device. Every rank must call this, with the same keys."""
        ...

    def model_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the weights under the model's names before `prepare`."""
        ...

    def load_model_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load such weights, in place, and return the missing and the unexpected names.

        Raises:
            RuntimeError: If `strict` and a name is missing or unexpected, or if a shape differs.
        """
        ...

    def optimizer_state_dict(self, model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state, as the optimizer of an unwrapped model has it."""
        ...

    def load_optimizer_state_dict(
        self, model: torch.nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load such a state, in place."""
        ...


class SingleDevice:
    """Training in one process on one device.

    Args:
        device: The device of the model.

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
        """Move the model and the optimizers' states to the device, in place."""
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
        """Return the batch unchanged."""
        return batch

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing, the same object each time."""
        return _NOTHING

    @contextmanager
    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> Iterator[None]:
        """Return a context manager that calls `check` at its end."""
        yield
        check()

    def backward(self, loss: torch.Tensor, *, create_graph: bool = False) -> None:
        """Accumulate the gradients of a loss."""
        loss.backward(create_graph=create_graph)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients, in place, to a total norm of at most `max_norm`, and return the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Take an optimizer step, through the gradient scaler if one scaled the losses."""
        # A scaler skips the step if a gradient overflowed, so it must call the optimizer itself.
        step = _unprofiled_step(optimizer) if scaler is None else partial(scaler.step, optimizer)
        return step() if closure is None else step(closure=closure)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters."""
        if getattr(optimizer.zero_grad, "__func__", None) is not _ZERO_GRAD:  # overridden by a subclass or replaced
            optimizer.zero_grad()
            return
        # The effect of PyTorch's own method with `set_to_none`, without its profiler range.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return the counts unchanged."""
        return values

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the values unchanged."""
        return dict(values)  # a new dict, as with several ranks

    def model_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the model's own state dict, which shares the weights' memory."""
        return model.state_dict()

    def load_model_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load weights, in place, and return the missing and the unexpected names."""
        keys = model.load_state_dict(state_dict, strict=strict)
        return keys.missing_keys, keys.unexpected_keys

    def optimizer_state_dict(self, model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's own state dict, which shares the states' memory."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(
        self, model: torch.nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load an optimizer's state, in place."""
        optimizer.load_state_dict(dict(state_dict))  # torch requires a dict


def _unprofiled_step(optimizer: Any) -> Callable[..., Any]:
    """Return an optimizer's `step` without PyTorch's profiler range, if no hook or profiler is active.

    The range takes longer than a small model's whole forward pass. A `step` that something else has wrapped or
    replaced, such as a learning rate scheduler, is returned unchanged.
    """
    step = optimizer.step
    wrapper = getattr(step, "__func__", None)
    is_watched = (
        profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
    if getattr(wrapper, "__code__", None) is not _WRAPPER or is_watched:
        return step
    return MethodType(wrapper.__wrapped__, optimizer)  # pyright: ignore[reportOptionalMemberAccess]  # checked by its code
