"""Norms that say how training with AdamW goes, parameter by parameter and over ranks."""

from typing import Any

import torch
import torch.distributed as tdist
from torch import Tensor

from composer_dist import dist
from composer_optim._decay import decay_rate, get_initial_lr

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
