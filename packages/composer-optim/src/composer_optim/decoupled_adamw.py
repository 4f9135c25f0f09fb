"""AdamW with weight decay that is decoupled from the choice of learning rate too."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as tdist
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from composer_dist import dist
from composer_optim._decay import check_group, decay_rate, evaluate, get_initial_lr, shrink, warn_of_large_decay

__all__ = ["DecoupledAdamW"]

_NORM = "l2_norm"


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(_local(tensor))


METRIC_FUNCTIONS = {
    f"{_NORM}/moment": lambda param, optim_state, step_tensor: _norm(optim_state["exp_avg"]),
    f"{_NORM}/param": lambda param, optim_state, step_tensor: _norm(param),
    f"{_NORM}/update": lambda param, optim_state, step_tensor: _norm(step_tensor),
    f"{_NORM}/grad": lambda param, optim_state, step_tensor: _norm(param.grad),
}


def last_update(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Return by how much the last step lowered this rank's part of `param`, had it been at the present `lr`."""
    beta1, beta2 = group["betas"]
    second_moment = _local(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
    denominator = second_moment.sqrt() / (1 - beta2 ** state["step"]).sqrt() + group["eps"]
    adam = _local(state["exp_avg"]) / denominator * (group["lr"] / (1 - beta1 ** state["step"]))
    # p_new = (1 - rate) * p_old - adam, solved for p_old - p_new without subtracting numbers that are nearly equal
    rate = decay_rate(group["lr"], get_initial_lr(group), group["weight_decay"])
    return (adam + rate * _local(param)) / (1 - rate)


def square_norms(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Square the norms in place."""
    for name in metrics:
        if name.startswith(_NORM):
            metrics[name] = metrics[name] ** 2
    return metrics


def reduce_over_ranks(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add up the squared norms of all ranks and take roots; average the rest. In place; every rank must call it."""
    names_by_rank = dist.all_gather_object(sorted(metrics))
    if dist.is_initialized():
        names = sorted(set().union(*names_by_rank))
        if not names:
            return metrics
        device = next(iter(metrics.values())).device if metrics else _communication_device()
        zero = torch.zeros((), device=device)
        sums = torch.stack([metrics.get(name, zero).to(device, torch.float32) for name in names])
        tdist.all_reduce(sums)
        metrics.update(zip(names, sums.unbind(), strict=True))
    for name, value in metrics.items():
        if name.startswith(_NORM):
            metrics[name] = value.sqrt()
        else:
            metrics[name] = value / sum(name in names for names in names_by_rank)
    return metrics


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as real numbers and without gradient."""
    part = tensor.detach()
    to_local = getattr(part, "to_local", None)  # asked for by name, since DTensor is slow to import
    if to_local is not None:
        part = to_local()
    return torch.view_as_real(part) if part.is_complex() else part


def _communication_device() -> torch.device:
    """Return where a rank that has no metrics of its own is to receive those of the others."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None or tdist.get_backend() == "gloo" else accelerator


class DecoupledAdamW(AdamW):
    """AdamW with weight decay apart from the choice of learning rate.

    Each step multiplies the weights by `1 - (lr / initial_lr) * weight_decay` and then does what `torch.optim.Adam`
    does without weight decay, which is `torch.optim.AdamW` with `weight_decay / initial_lr` for its weight decay.
    `initial_lr` is the learning rate that a parameter group begins with; it is kept in the group. Where it is 0,
    `lr / initial_lr` counts as 1.

    Args:
        params: Parameters, named parameters, or groups of them.
        lr: The learning rate.
        betas: How much of the mean and of the mean square of the gradients is kept from step to step.
        eps: Added to the denominator.
        weight_decay: Which share of the weights a step at the initial learning rate takes away.
        amsgrad: Whether the denominator never shrinks.
        maximize: Whether to go up the gradient instead of down.
        foreach: Whether to use kernels over all tensors at once; by default PyTorch decides.
        capturable: Whether steps can be recorded in a CUDA graph.
        fused: Whether to use the one kernel that does it all.

    Raises:
        TypeError: If an option, also one of a group, is of the wrong kind.
        ValueError: If a number is NaN, infinite, or out of its range.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)

    Reference:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, arXiv:1711.05101, algorithm 2.
    """

    metric_functions: ClassVar[dict[str, Callable[[Tensor, dict[str, Any], Tensor], Tensor]]] = METRIC_FUNCTIONS

    # Which group a parameter is in, and where in it, by its id; as of the last search.
    _places: Mapping[int, tuple[int, int]] = MappingProxyType({})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_group({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
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

        Raises:
            RuntimeError: If a gradient is sparse, or the step is recorded in a CUDA graph without `capturable`.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            _check_capture(group)
            params = [param for param in group["params"] if param.grad is not None]
            states = [self._initialized_state(param, group) for param in params]
            beta1, beta2 = group["betas"]
            self.adamw(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
                [state["step"] for state in states],
                amsgrad=group["amsgrad"],
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                initial_lr=get_initial_lr(group),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                capturable=group["capturable"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
        return loss

    @staticmethod
    def adamw(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        *,
        amsgrad: bool,
        beta1: float,
        beta2: float,
        lr: float | Tensor,
        initial_lr: float,
        weight_decay: float,
        eps: float,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Do one step on lists of tensors, in place.

        Args:
            params: The weights.
            grads: One gradient for each of them.
            exp_avgs: The running means of the gradients.
            exp_avg_sqs: The running means of their squares.
            max_exp_avg_sqs: The largest of those so far. Empty without `amsgrad`.
            state_steps: The numbers of steps done.
            amsgrad: As for the class, and so are all options that are not explained here.
            beta1: How much of `exp_avgs` is kept.
            beta2: How much of `exp_avg_sqs` is kept.
            lr: The present learning rate.
            initial_lr: The one that training began with.
            weight_decay: See there.
            eps: See there.
            maximize: See there.
            foreach: See there.
            capturable: See there.
            fused: See there.
            grad_scale: What the gradients are to be divided by; for `fused` only.
            found_inf: Not 0 if nothing is to be changed, because a gradient is not finite; for `fused` only.
        """
        if initial_lr == 0:
            shrink(params, decay_rate(lr, initial_lr, weight_decay), found_inf)
            weight_decay = 0.0
        elif weight_decay != 0:
            weight_decay /= initial_lr  # PyTorch multiplies it by lr
        adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            state_steps,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
            grad_scale=grad_scale,
            found_inf=found_inf,
            has_complex=any(torch.is_complex(param) for param in params),
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )

    def report_per_parameter_metrics(
        self, param: Tensor, name: str, optimizer_metrics: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add the norms of a parameter, its gradient, its momentum and its last update, as they are on this rank.

        They stay on the parameter's device. The last update is taken at the present learning rate. A parameter that
        has no gradient, or that was never stepped, adds nothing.

        Args:
            param: A parameter of this optimizer.
            name: What to call it.
            optimizer_metrics: Changed in place: gets a `"<metric>/<name>"` for each of `metric_functions`.

        Returns:
            `optimizer_metrics`.
        """
        state = self.state.get(param)
        if param.grad is None or not state:
            return optimizer_metrics
        update = last_update(param, state, self._group_of(param))
        for metric, function in self.metric_functions.items():
            optimizer_metrics[f"{metric}/{name}"] = function(param, state, update)
        return optimizer_metrics

    @staticmethod
    def pre_reduce_metrics(optimizer_metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Square the norms, in place, so that those of different ranks' shards can be added.

        Args:
            optimizer_metrics: What `report_per_parameter_metrics` has filled.

        Returns:
            `optimizer_metrics`.
        """
        return square_norms(optimizer_metrics)

    @staticmethod
    def dist_reduce_metrics(optimizer_metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn the squares of the ranks' norms into the norms of the whole tensors, in place.

        Every rank must call this. For parameters of which each rank holds another shard; without a process group there
        is one rank. Metrics that are no norms are averaged over the ranks that have them.

        Args:
            optimizer_metrics: What `pre_reduce_metrics` returned. Gets the keys of all ranks.

        Returns:
            `optimizer_metrics`.
        """
        return reduce_over_ranks(optimizer_metrics)

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        """Return the group of a parameter, by one search for all parameters as long as the groups stay the same."""
        index, position = self._places.get(id(param), (0, 0))
        # Groups may be replaced and changed by anyone, so what was found earlier is looked at again.
        there = [each for group in self.param_groups[index : index + 1] for each in group["params"][position:][:1]]
        if not there or there[0] is not param:
            self._places = {
                id(each): (index, position)
                for index, group in enumerate(self.param_groups)
                for position, each in enumerate(group["params"])
            }
            index, _ = self._places[id(param)]
        return self.param_groups[index]

    def _initialized_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, made when it is first stepped."""
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError(
                "DecoupledAdamW got a sparse gradient, which it has no kernels for. Make the layer dense, such as "
                "Embedding(sparse=False), or give its weights to torch.optim.SparseAdam."
            )
        state = self.state[param]
        if not state:
            # PyTorch's kernels read the count on the host, unless they are fused or recorded.
            on_device = group["capturable"] or group["fused"]
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _check_capture(group: dict[str, Any]) -> None:
    """Refuse to be recorded with a count of steps on the host, which would stand still when the graph is replayed."""
    if group["capturable"] or torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "capturable=False, but the step is recorded in a CUDA graph, which would repeat the bias correction of "
            "this step for ever. Make the optimizer with capturable=True."
        )
