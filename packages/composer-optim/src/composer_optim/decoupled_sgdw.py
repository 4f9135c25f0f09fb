"""Stochastic gradient descent with decoupled weight decay."""

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from composer_optim._decay import Decoupled, check_group, decay_rate, evaluate, fit_for_fused, get_initial_lr, shrink

__all__ = ["DecoupledSGDW"]

_OPTIONS = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "foreach")


class DecoupledSGDW(Decoupled, SGD):
    """Stochastic gradient descent with weight decay that is independent of the gradient and of the learning rate.

    Each step multiplies the weights by `1 - (lr / initial_lr) * weight_decay` and then performs the step of
    `torch.optim.SGD` without weight decay. `initial_lr` is the initial learning rate of a parameter group and is stored
    in the group. If it is 0, `lr / initial_lr` counts as 1.

    Args:
        params: Parameters, named parameters, or groups of them.
        lr: The learning rate.
        momentum: 0 or more.
        dampening: The gradient enters the momentum multiplied by `1 - dampening`.
        weight_decay: Fraction of the weights that a step at the initial learning rate removes.
        nesterov: Whether to use Nesterov momentum.
        maximize: Whether to maximize the objective instead of minimizing it.
        foreach: Whether to use multi-tensor kernels; by default PyTorch decides, where steps are not fused.
        fused: Whether to use the fused kernel. By default it steps groups whose weights are all on a GPU when the step
            begins and not sharded, unless `foreach` is set. Sparse gradients are stepped without it.

    Raises:
        TypeError: If an option, also of a parameter group, has the wrong type.
        ValueError: If a number is NaN, infinite, or out of its range.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)

    Reference:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, arXiv:1711.05101, algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        check_group({"lr": lr, **options})
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, foreach=foreach, fused=fused
        )
        self._warn_of_large_decay()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step.

        Args:
            closure: Reevaluates the model, calls `backward` and returns the loss.

        Returns:
            The result of `closure`.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        grads: list[Any] = [param.grad for param in params]
        states = [self.state[param] for param in params] if group["momentum"] != 0 else []
        kernel = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        kernel["fused"] = self._uses_fused(group) or group["fused"]
        if kernel["fused"] and any(grad.is_sparse for grad in grads):
            ready = _unscaled(grads, kernel["grad_scale"], kernel["found_inf"])
            if ready is None:
                return
            grads, kernel = ready, {"fused": False}
        elif kernel["fused"]:
            grads = fit_for_fused(params, grads, states)
        # From `state` into a list and back below: PyTorch's functional form creates missing buffers in the list.
        buffers = [state.get("momentum_buffer") for state in states]
        options = {name: group[name] for name in _OPTIONS}
        self.sgdw(params, grads, buffers, initial_lr=get_initial_lr(group), **kernel, **options)
        for state, buffer in zip(states, buffers, strict=True):
            state["momentum_buffer"] = buffer

    @staticmethod
    def sgdw(
        params: list[Tensor],
        grads: list[Tensor],
        momentum_buffers: list[Tensor | None],
        *,
        lr: float | Tensor,
        initial_lr: float,
        weight_decay: float,
        maximize: bool = False,
        fused: bool | None = None,
        found_inf: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Perform one step on lists of tensors, in place.

        Args:
            params: The weights.
            grads: One gradient per weight, dense or sparse.
            momentum_buffers: One per weight, `None` for a missing one, which is created. Empty without momentum.
            lr: The current learning rate.
            initial_lr: The initial learning rate.
            weight_decay: As for the class.
            maximize: As for the class.
            fused: As for the class.
            found_inf: Not 0 to skip the step, because a gradient is not finite; only with `fused`.
            **options: Other options of PyTorch's function `sgd`, such as `momentum`.
        """
        # A separate pass: the weight decay of PyTorch's SGD is part of the gradient, and would enter the momentum.
        shrink(params, decay_rate(lr, initial_lr, weight_decay), found_inf)
        options |= {"lr": lr, "weight_decay": 0.0, "maximize": maximize, "fused": fused, "found_inf": found_inf}
        run = partial(sgd, has_sparse_grad=any(grad.is_sparse for grad in grads), **options)
        is_new = [buffer is None for buffer in momentum_buffers]
        if fused and any(is_new) and not all(is_new):
            # In one call the fused kernel creates either all buffers or none.
            for part in (is_new, [not each for each in is_new]):
                buffers = list(compress(momentum_buffers, part))
                run(list(compress(params, part)), list(compress(grads, part)), buffers)
                for index, buffer in zip(compress(range(len(params)), part), buffers, strict=True):
                    momentum_buffers[index] = buffer
        else:
            run(params, grads, momentum_buffers)
        # PyTorch's fused SGD creates buffers with `empty_like` and does not write them when it skips the step (seen in
        # 2.15), so the next step would add uninitialized memory to the weights. With 0 it dampens the first gradient
        # that counts, if there is dampening. Masked on the device, without a synchronization.
        for buffer in compress(momentum_buffers, is_new):
            if buffer is not None and found_inf is not None:
                buffer.masked_fill_(found_inf.to(buffer.device).reshape(()) != 0, 0.0)


def _unscaled(grads: list[Tensor], scale: Tensor | None, found_inf: Tensor | None) -> list[Tensor] | None:
    """Return gradients for kernels that neither unscale nor skip on the device, or `None` to skip the step."""
    if found_inf is not None and found_inf.item():
        return None
    return grads if scale is None else [grad / scale for grad in grads]
