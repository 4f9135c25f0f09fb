"""Stochastic gradient descent with decoupled weight decay."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from composer_optim._decay import check_group, decay_rate, evaluate, get_initial_lr, shrink, warn_of_large_decay

__all__ = ["DecoupledSGDW"]


class DecoupledSGDW(SGD):
    """Stochastic gradient descent with weight decay apart from the gradient and from the choice of learning rate.

    Each step multiplies the weights by `1 - (lr / initial_lr) * weight_decay` and then does what `torch.optim.SGD`
    does without weight decay. `initial_lr` is the learning rate that a parameter group begins with; it is kept in the
    group. Where it is 0, `lr / initial_lr` counts as 1.

    Args:
        params: Parameters, named parameters, or groups of them.
        lr: The learning rate.
        momentum: 0 or more.
        dampening: How much less than whole the gradient enters the momentum.
        weight_decay: Which share of the weights a step at the initial learning rate takes away.
        nesterov: Whether to look ahead along the momentum.
        maximize: Whether to go up the gradient instead of down.
        foreach: Whether to use kernels over all tensors at once; by default PyTorch decides.
        fused: Whether to use the one kernel that does it all.

    Raises:
        TypeError: If an option, also one of a group, is of the wrong kind.
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
        warn_of_large_decay(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; the learning rate they have now is their initial one.

        Args:
            param_group: `params`, and whichever options are not those of the constructor.

        Raises:
            TypeError: If an option is of the wrong kind.
            ValueError: If a number is NaN, infinite, or out of its range.
        """
        if isinstance(param_group, dict):  # PyTorch says so if it is none
            check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        get_initial_lr(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step.

        Args:
            closure: Evaluates the model anew, calls `backward` and returns the loss.

        Returns:
            What `closure` returned.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            has_momentum = group["momentum"] != 0
            buffers = [self.state[param].get("momentum_buffer") for param in params] if has_momentum else []
            self.sgdw(
                params,
                [param.grad for param in params],
                buffers,
                lr=group["lr"],
                initial_lr=get_initial_lr(group),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
            if has_momentum:
                for param, buffer in zip(params, buffers, strict=True):
                    self.state[param]["momentum_buffer"] = buffer
        return loss

    @staticmethod
    def sgdw(
        params: list[Tensor],
        grads: list[Tensor],
        momentum_buffers: list[Tensor | None],
        *,
        lr: float | Tensor,
        initial_lr: float,
        weight_decay: float,
        momentum: float,
        dampening: float,
        nesterov: bool,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Do one step on lists of tensors, in place.

        Args:
            params: The weights.
            grads: One gradient for each of them, dense or sparse.
            momentum_buffers: One each, with `None` in place of those still to be made. Empty without momentum.
            lr: The present learning rate.
            initial_lr: The one that training began with.
            weight_decay: As for the class, and so are the options that follow.
            momentum: See there.
            dampening: See there.
            nesterov: See there.
            maximize: See there.
            foreach: See there.
            fused: See there.
            grad_scale: What the gradients are to be divided by; for `fused` only.
            found_inf: Not 0 if nothing is to be changed, because a gradient is not finite; for `fused` only.
        """
        shrink(params, decay_rate(lr, initial_lr, weight_decay), found_inf)
        run = partial(
            sgd,
            has_sparse_grad=any(grad.is_sparse for grad in grads),
            foreach=foreach,
            fused=fused,
            grad_scale=grad_scale,
            found_inf=found_inf,
            weight_decay=0.0,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
        )
        is_new = [buffer is None for buffer in momentum_buffers]
        if fused and any(is_new) and not all(is_new):
            # The fused kernel makes all buffers of a call or none.
            for part in (is_new, [not each for each in is_new]):
                _run_part(run, params, grads, momentum_buffers, part)
        else:
            run(params, grads, momentum_buffers)
        if found_inf is not None:
            _clear_skipped(compress(momentum_buffers, is_new), found_inf)


def _run_part(
    run: Callable[[list[Tensor], list[Tensor], list[Tensor | None]], None],
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor | None],
    part: list[bool],
) -> None:
    """Step the parameters that `part` marks, and put the buffers that were made for them into `momentum_buffers`."""
    buffers = list(compress(momentum_buffers, part))
    run(list(compress(params, part)), list(compress(grads, part)), buffers)
    for index, buffer in zip(compress(range(len(params)), part), buffers, strict=True):
        momentum_buffers[index] = buffer


def _clear_skipped(new_buffers: Iterable[Tensor | None], found_inf: Tensor) -> None:
    """Set new buffers to 0 if the step was skipped, without anybody waiting to hear whether it was.

    PyTorch's fused SGD makes them with `empty_like` and leaves them unwritten when it skips the step (seen in 2.15), so
    the next step would put whatever lay in that memory into the weights. With 0 it dampens its gradient, the first one
    that counts, if there is dampening.
    """
    for buffer in new_buffers:
        if buffer is not None:
            buffer.masked_fill_(found_inf.to(buffer.device).reshape(()) != 0, 0.0)
