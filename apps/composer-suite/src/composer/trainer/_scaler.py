"""Gradient scaling in float16 for sharded models, and for optimizers that evaluate the loss themselves."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from composer_dist import dist


class ShardedGradScaler(GradScaler):
    """A `GradScaler` for models with some or all weights sharded.

    PyTorch's scaler does not accept a mixture of both, and reduces over the ranks that share the first gradient, which
    may not be those that share the others. This one checks each rank's shards and combines the results of all ranks, so
    that all ranks step, or none. Without sharded weights it behaves like `GradScaler`.
    """

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step if all gradients are finite, which for weights that FSDP offloads waits for the device."""
        if not self.is_enabled() or self._scale is None or self._scale.is_cpu:
            return super().step(optimizer, *args, **kwargs)
        state = states_of(self)[id(optimizer)]
        if state["stage"] is OptState.STEPPED or not any(weight.is_cpu for weight in _weights_of(optimizer)):
            return super().step(optimizer, *args, **kwargs)
        # A fused optimizer would copy the flag to the CPU without waiting, and read it at once.
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    # Overridden because the public `unscale_` divides and checks in one call of this method.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        weights = _weights_of(optimizer)
        is_sharded = any(hasattr(weight, "to_local") for weight in weights)
        offloaded = [] if found_inf.is_cpu else [_local(weight) for weight in weights if weight.is_cpu]
        here = [_local(weight) for weight in weights if found_inf.is_cpu or not weight.is_cpu]
        found = super()._unscale_grads_(_with(here), inv_scale, found_inf, allow_fp16)
        if offloaded:
            # PyTorch would copy both to the CPU without waiting, and read them at once.
            found |= super()._unscale_grads_(_with(offloaded), inv_scale.cpu(), found_inf.cpu(), allow_fp16)
        found.setdefault(found_inf.device, found_inf)  # even a rank without gradients must join the collectives
        for one in found.values() if is_sharded else ():
            dist.all_reduce(one, "MAX")
        return found


class ClosureGradScaler(ShardedGradScaler):
    """A `GradScaler` for optimizers that call a closure once or several times per step, such as SAM.

    After each call the gradients are unscaled. If one is infinite or NaN on any rank, the closure returns `None` on all
    ranks, and the optimizer must skip its step; its `step` must therefore accept such a closure. The scale is the same
    on every rank.

    Args:
        device: The type of the gradients' device, `'cuda'` or `'cpu'`; further arguments are those of `GradScaler`.

    Example:
        >>> weight = torch.tensor([3.0], requires_grad=True)
        >>> class Careful(torch.optim.SGD):
        ...     def step(self, closure):
        ...         loss = closure()
        ...         return loss if loss is None else super().step()
        >>> scaler, optimizer = ClosureGradScaler("cpu", init_scale=4.0), Careful([weight], lr=0.1)
        >>> def closure():
        ...     scaler.scale((weight**2).sum() / 2).backward()
        ...     return weight.grad
        >>> _ = scaler.step(optimizer, closure=closure)
        >>> scaler.update()
        >>> round(weight.item(), 4)
        2.7
    """

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer. Every rank must call this."""
        closure: Callable[..., Any] | None = kwargs.pop("closure", None)
        if closure is None or not self.is_enabled():
            own = {} if closure is None else {"closure": closure}
            return super().step(optimizer, *args, **kwargs, **own)

        def checked(**settings: Any) -> Any:
            states_of(self).pop(id(optimizer), None)  # `unscale_` raises on a second call within a step
            optimizer.zero_grad()
            with torch.enable_grad():
                value = closure(**settings)
            if states_of(self)[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)
            return None if self._is_infinite_anywhere(optimizer) else value

        result = optimizer.step(*args, closure=checked, **kwargs)  # pyright: ignore[reportCallIssue]  # takes what it knows
        # `update` requires a step; `GradScaler.step`, which would record it, does not support closures.
        states_of(self)[id(optimizer)]["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale from the gradients of all ranks. Every rank must call this."""
        if self.is_enabled() and new_scale is None:
            for state in states_of(self).values():
                for found in state["found_inf_per_device"].values():
                    dist.all_reduce(found, "MAX")
        super().update(new_scale)

    def _is_infinite_anywhere(self, optimizer: Optimizer) -> bool:
        found = list(states_of(self)[id(optimizer)]["found_inf_per_device"].values())
        # Reduced as one number, because the ranks' gradients may lie on different numbers of devices.
        together = torch.stack([one.to(found[0].device) for one in found]).amax()
        dist.all_reduce(together, "MAX")
        for one in found:
            one.copy_(together)
        return bool(together.item())


def unscale(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
    """Unscale the gradients of all optimizers. If those of one overflow, none of them steps."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    if len(optimizers) > 1:
        # Clipping by the norm of all gradients spreads the overflow of one optimizer to those of the others.
        of_each = [states_of(scaler)[id(optimizer)]["found_inf_per_device"] for optimizer in optimizers]
        found: list[torch.Tensor] = [one for of_devices in of_each for one in of_devices.values()]
        if found:
            total = torch.stack([one.to(found[0].device) for one in found]).amax()
            for of_devices in of_each:
                # Separate tensors, since `update` adds them up in place.
                of_devices[total.device] = total.clone()


def _weights_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _with(weights: list[torch.Tensor]) -> Any:
    return SimpleNamespace(param_groups=[{"params": weights}])


def _local(weight: torch.Tensor) -> torch.Tensor:
    """Return a stand-in whose gradient is this rank's shard, in the same memory."""
    gradient: Any = weight.grad
    if gradient is None or not hasattr(gradient, "to_local"):
        return weight
    with torch.no_grad():
        part = gradient.to_local()
        stand_in = part.detach()
        stand_in.grad = part
    return stand_in


def forget_checks(scaler: GradScaler) -> None:
    """Reset the checks of a scaler, because gradients that it has unscaled are computed again."""
    # `update` does this too, but also changes the scale; a public method for the reset alone does not exist.
    states_of(scaler).clear()


def states_of(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    """Return the scaler's state of each optimizer by its `id`, for which torch has no public method."""
    return scaler._per_optimizer_states  # pyright: ignore[reportPrivateUsage]
