"""Parameters without a gradient under DeepSpeed, whose engine takes their gradients for zeros.

An optimizer of torch passes over a parameter without a gradient. The engine gives it a zero instead (stage 0), or one
flat tensor of many parameters in which its part is zero (stages 1 and 2), and momentum and weight decay move it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from composer_dist.averaging import sum_counts
from composer_dist.deepspeed_state import find_in_optimizer

__all__ = ["UnusedParameters"]


class UnusedParameters:
    """Keep an engine's optimizer from moving parameters that got no gradient in a step, and their optimizer state.

    At stage 0 a gradient on any rank counts for all; above, every rank must use the same parameters. One count of
    steps that the optimizer keeps for a whole flat tensor, as Adam does, goes on for all that is in it.

    Args:
        engine: At stage 0, 1 or 2.
        parameters: Those of its optimizer, before the engine flattened them.
    """

    def __init__(self, engine: Any, parameters: Iterable[Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._is_whole = engine.zero_optimization_stage() == 0
        self._slices: dict[torch.Tensor, list[tuple[Parameter, slice]]] = defaultdict(list)
        for parameter, tensor, where in find_in_optimizer(engine, self._parameters):
            self._slices[tensor].append((parameter, where))
        self._used: set[Parameter] = set()
        self._before: list[tuple[torch.Tensor, slice, dict[str, torch.Tensor]]] = []
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._used.add)
        engine.basic_optimizer.register_step_pre_hook(self._keep)
        engine.basic_optimizer.register_step_post_hook(self._put_back)

    def begin_step(self) -> None:
        """Agree on what is used, before the engine's step. Every rank must call this."""
        if self._is_whole:
            counts = sum_counts([int(parameter in self._used) for parameter in self._parameters])
            self._used.update(each for each, count in zip(self._parameters, counts, strict=True) if count)

    def end_step(self) -> None:
        """Forget what was used."""
        self._used.clear()

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        for tensor in _tensors(optimizer):
            for parameter, where in self._slices[tensor]:
                if parameter in self._used:
                    continue
                if self._is_whole:
                    tensor.grad = None
                else:
                    values = {"": tensor, **_state_like(tensor, optimizer)}
                    self._before.append((tensor, where, {key: each[where].clone() for key, each in values.items()}))

    @torch.no_grad()
    def _put_back(self, optimizer: Optimizer, *_: Any) -> None:
        for tensor, where, before in self._before:
            for key, value in {"": tensor, **_state_like(tensor, optimizer)}.items():
                value[where] = before.get(key, 0.0)  # a state that this step has made begins with zeros
        self._before.clear()


def _tensors(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _state_like(tensor: torch.Tensor, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return what the optimizer keeps for each number of a tensor."""
    state = optimizer.state.get(tensor, {})
    return {key: value for key, value in state.items() if torch.is_tensor(value) and value.shape == tensor.shape}
