"""What an attempt at a batch, or a half-made step, has changed, made what it was before."""

import copy
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.trainer._kept_buffers import KeptBuffers
from composer.trainer._tensor_copies import copies_of, copy_all, local_part
from composer_events.state import State

__all__ = ["BatchUndo", "MetricsUndo", "StepUndo"]


class BatchUndo:
    """Undoes what forward passes leave behind: buffers, draws of random numbers, what algorithms count.

    Of each algorithm the attributes are kept, not what they hold; one that changes its tensors in place between
    BEFORE_TRAIN_BATCH and AFTER_TRAIN_BATCH changes them in each attempt.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._batch = state.batch
        self._buffers = KeptBuffers(state.model)
        self._buffers.keep()
        self._algorithms = [(algorithm, dict(vars(algorithm))) for algorithm in state.algorithms]
        self._draws = _random_states(state.device.torch_device)

    def __call__(self) -> None:
        """Make it all what it was, and let go of the attempt's tensors."""
        state = self._state
        state.batch, state.outputs, state.loss = self._batch, torch.empty(0), torch.empty(0)
        self._buffers.restore()
        for algorithm, attributes in self._algorithms:
            vars(algorithm).clear()
            vars(algorithm).update(attributes)
        for restore, generator_state in self._draws:
            restore(generator_state)


class MetricsUndo:
    """Undoes updates of metrics, by what each of them and of its parts has for attributes."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        parts = [part for metric in metrics.values() for part in _parts_of(metric)]
        self._kept = [(part, _copy_values(vars(part))) for part in parts]

    def __call__(self) -> None:
        """Make it all what it was."""
        for part, values in self._kept:
            vars(part).clear()
            vars(part).update(_copy_values(values))


class StepUndo:
    """Undoes an optimizer's steps, be it a part of one or many: weights, the optimizer's state and settings.

    The copies lie on the device, where the backward pass has just left room for them, and on the host if there is
    none. Each rank copies its own part.

    Args:
        optimizer: Whose parameters are copied.
        on_host: Whether the host is the better place, since a forward and a backward pass are still to come.
        with_settings: Whether learning rates and the like become what they were, too.
    """

    def __init__(self, optimizer: Optimizer, *, on_host: bool = False, with_settings: bool = True) -> None:
        self._optimizer = optimizer
        weights = [local_part(p) for group in optimizer.param_groups for p in group["params"]]
        groups = optimizer.param_groups if with_settings else ()
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        # For each parameter its entries: which objects they are, and copies of what is in them.
        self._state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
        self._tensors = [*weights, *_tensors_in(self._state.values()), *_tensors_in(self._groups)]
        self._copies = copies_of(self._tensors, on_host=on_host)
        self._others = {
            (parameter, name): copy.deepcopy(value)
            for parameter, entries in self._state.items()
            for name, value in entries.items()
            if not isinstance(value, Tensor)
        }

    def __call__(self) -> None:
        """Make it all what it was. The copies stay good for another time."""
        copy_all(self._tensors, self._copies)
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=False):
            for name in [name for name in group if name != "params" and name not in kept]:
                del group[name]
            group.update(kept)
        state = self._optimizer.state
        for parameter in [parameter for parameter in state if parameter not in self._state]:
            del state[parameter]
        for parameter, entries in self._state.items():
            present = state[parameter]
            present.clear()
            for name, value in entries.items():
                is_restored = isinstance(value, Tensor)
                present[name] = value if is_restored else copy.deepcopy(self._others[parameter, name])


def _parts_of(metric: Any) -> Iterable[Any]:
    return metric.modules() if isinstance(metric, torch.nn.Module) else [metric]


def _copy_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy tensors, which a metric changes in place, and lists, to which it appends; all else it sets anew."""
    copies = dict(values)
    for name, value in values.items():
        if isinstance(value, Tensor):
            copies[name] = value.clone()
        elif isinstance(value, list):
            copies[name] = list(value)
    return copies


def _tensors_in(dicts: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [local_part(value) for entries in dicts for value in entries.values() if isinstance(value, Tensor)]


def _random_states(device: torch.device) -> Iterable[tuple[Callable[[Any], object], Any]]:
    """Return the state of each generator of this process, with what restores it."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if device.type == "cuda":
        states.append((lambda state: torch.cuda.set_rng_state(state, device), torch.cuda.get_rng_state(device)))
    numpy: Any = sys.modules.get("numpy")  # nobody who has not imported it draws from it
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states
