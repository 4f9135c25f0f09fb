"""What an attempt at a batch, or a half-made step, has changed, made what it was before."""

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_events.state import State

__all__ = ["copies_of", "copy_all", "local_part", "BatchUndo", "MetricsUndo", "StepUndo"]


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


class KeptBuffers:
    """Copies of a model's buffers, such as running means, which a forward pass over a bad batch ruins.

    What PyTorch has not seen change since the latest copy is not copied again: a constant, however large, costs memory
    once and no time. A kernel of one's own has to say what it changes (`torch.autograd.graph.increment_version`).

    Args:
        model: Its modules are looked up once, their buffers at each batch.
        num_batches: Of how many batches the copies are kept.
    """

    def __init__(self, model: nn.Module, num_batches: int = 1) -> None:
        # The dict itself, here and below: to look buffers up one by one takes longer than to copy them.
        self._owners = [module for module in model.modules() if module._buffers]  # pyright: ignore[reportPrivateUsage]
        self._kept: deque[list[_OfModule]] = deque(maxlen=num_batches)

    def keep(self) -> None:
        """Remember the buffers as they are before a batch."""
        if not self._owners:
            return
        latest = self._kept[-1] if self._kept else [None] * len(self._owners)
        kept: list[_OfModule] = []
        made: list[_OfModule] = []
        for owner, before in zip(self._owners, latest, strict=True):
            if before is None or not before.is_current():
                before = _OfModule(owner, room=before if self._kept.maxlen == 1 else None)
                made.append(before)
            kept.append(before)
        _fill(made)
        self._kept.append(kept)

    def restore(self) -> None:
        """Make the buffers what they were before the earliest of the batches, be they changed or replaced."""
        for of_module in self._kept[0] if self._kept else ():
            of_module.restore()


class _OfModule:
    """The buffers of one module, and copies of their values once `_fill` has made these.

    Args:
        owner: The module.
        room: Earlier copies that nobody needs any more.
    """

    def __init__(self, owner: nn.Module, room: "_OfModule | None") -> None:
        self._buffers = owner._buffers  # pyright: ignore[reportPrivateUsage]
        self._seen = dict(self._buffers)  # which tensors they are
        self.tensors = [local_part(tensor) for tensor in self._seen.values() if tensor is not None]
        # batch_norm() changes running means without saying so, and these kinds of tensors do not count changes.
        is_silent = any(t.is_inference() or hasattr(t, "to_local") for t in self._seen.values() if t is not None)
        self._changes_unseen = is_silent or "running_mean" in self._seen
        self._versions = None if self._changes_unseen else self._count()
        self.copies: list[Tensor] = []
        if room is not None and [_kind(t) for t in room.copies] == [_kind(t) for t in self.tensors]:
            self.copies = room.copies

    def is_current(self) -> bool:
        """Say whether nothing has changed or replaced a buffer since."""
        return not self._changes_unseen and self._is_same() and self._count() == self._versions

    def restore(self) -> None:
        """Put the tensors back, with their values."""
        copy_all(self.tensors, self.copies)
        self._buffers.clear()
        self._buffers.update(self._seen)

    def _is_same(self) -> bool:
        now, seen = self._buffers, self._seen
        return len(now) == len(seen) and all(now.get(name) is tensor for name, tensor in seen.items())

    def _count(self) -> list[int]:
        """Return how often each tensor has been changed in place."""
        return [tensor._version for tensor in self._seen.values() if tensor is not None]


def _fill(made: list[_OfModule]) -> None:
    """Copy what there is now, into the room there is."""
    anew = [of_module for of_module in made if not of_module.copies]
    old = [of_module for of_module in made if of_module.copies]
    copy_all([c for of_module in old for c in of_module.copies], [t for of_module in old for t in of_module.tensors])
    copies = iter(copies_of([tensor for of_module in anew for tensor in of_module.tensors]))
    for of_module in anew:
        of_module.copies = [next(copies) for _ in of_module.tensors]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


class Snapshot:
    """A copy of weights, buffers and an optimizer's state, each rank's own part of them.

    Learning rates are not part of it: the schedule goes on.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._buffers = KeptBuffers(model)
        self._buffers.keep()
        self._undo_steps = StepUndo(optimizer, with_settings=False)

    def restore(self) -> None:
        """Make all of it what it was. The copy stays good for another time."""
        self._buffers.restore()
        self._undo_steps()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's own part of a tensor that may be spread over ranks; it shares the memory."""
    tensor = tensor.detach()
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # that of a DTensor
    return tensor if to_local is None else to_local()


@torch.no_grad()
def copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    """Write the values of tensors into others, one into each."""
    if to:
        torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]  # no public name


@torch.no_grad()
def copies_of(tensors: Sequence[Tensor], *, on_host: bool = False) -> list[Tensor]:
    """Return copies of tensors; on the host where the device has no room for them."""
    local = [local_part(tensor) for tensor in tensors]
    if not on_host:
        try:
            copies = [torch.empty_like(tensor) for tensor in local]
        except torch.OutOfMemoryError:
            on_host = True
        else:
            copy_all(copies, local)
            return copies
    return [tensor.to("cpu", copy=True) for tensor in local]
