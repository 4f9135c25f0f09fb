"""Restore what a failed batch or optimizer step has changed."""

import copy
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_dist import reproducibility
from composer_events.arguments import loaded
from composer_events.state import State


class BatchUndo:
    """Copy of what forward passes change: buffers, random states and the counters of algorithms.

    Attributes of algorithms are restored by reference: an algorithm that changes its tensors in place between
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
        state = self._state
        state.batch, state.outputs, state.loss = self._batch, torch.empty(0), torch.empty(0)
        self._buffers.restore()
        for algorithm, attributes in self._algorithms:
            # Cleared first, so that attributes that the attempt has added go away.
            vars(algorithm).clear()
            vars(algorithm).update(attributes)
        for restore, generator_state in self._draws:
            restore(generator_state)


class MetricsUndo:
    """Copy of the attributes of metrics and their submodules."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        parts: list[object] = [part for metric in metrics.values() for part in metric.modules()]
        self._kept = [(part, _copy_values(vars(part))) for part in parts]

    def __call__(self) -> None:
        for part, values in self._kept:
            vars(part).clear()
            # Copied again, since the next attempt may change them once more.
            vars(part).update(_copy_values(values))


class StepSnapshot:
    """Copy of weights and of the state and settings of optimizers, before a partial or whole step.

    The copies are on the device, where the backward pass has just freed memory, or on the host if they do not fit.
    Each rank copies its own shards.

    Args:
        optimizers: The optimizers, whose parameters are copied.
        on_host: Whether to copy to the host, because a forward and a backward pass still need the device's memory.
        with_settings: Whether to restore learning rates and other settings, too.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, on_host: bool = False, with_settings: bool = True) -> None:
        self._optimizers = list(optimizers)
        groups = self._all_groups()
        weights = [local_part(p) for group in groups for p in group["params"]]
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in groups if with_settings]
        # For each parameter the original objects; their values are in the copies below.
        self._states = [{p: dict(entries) for p, entries in each.state.items()} for each in optimizers]
        entries_of = [entries for state in self._states for entries in state.values()]
        self._tensors = [*weights, *_tensors_in(entries_of), *_tensors_in(self._groups)]
        self._copies = copies_of(self._tensors, on_host=on_host)
        self._others = {
            (place, parameter, name): copy.deepcopy(value)
            for place, state in enumerate(self._states)
            for parameter, entries in state.items()
            for name, value in entries.items()
            if not isinstance(value, Tensor)
        }

    def _all_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def __call__(self) -> None:
        """Restore everything. The copies can be used again."""
        copy_all(self._tensors, self._copies)
        # Not strict, because `_groups` is empty without settings.
        for group, kept in zip(self._all_groups(), self._groups, strict=False):
            for name in [name for name in group if name != "params" and name not in kept]:
                del group[name]
            group.update(kept)
        for place, (optimizer, before) in enumerate(zip(self._optimizers, self._states, strict=True)):
            state = optimizer.state
            # State that the step itself has created.
            for parameter in [parameter for parameter in state if parameter not in before]:
                del state[parameter]
            for parameter, entries in before.items():
                present = state[parameter]
                present.clear()
                for name, value in entries.items():
                    is_restored = isinstance(value, Tensor)
                    present[name] = value if is_restored else copy.deepcopy(self._others[place, parameter, name])


def _copy_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors, which a metric changes in place, and the lists, to which it appends."""
    copies = dict(values)
    for name, value in values.items():
        if isinstance(value, Tensor):
            copies[name] = value.clone()
        elif isinstance(value, list):
            copies[name] = list(cast("list[object]", value))
    return copies


def _tensors_in(dicts: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [local_part(value) for entries in dicts for value in entries.values() if isinstance(value, Tensor)]


def _random_states(device: torch.device) -> Iterable[tuple[Callable[[Any], object], Any]]:
    """Return the state of each random generator of this process, with the function that restores it."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    own = reproducibility.device_rng(device)
    states += [] if own is None else [own]
    numpy = loaded("numpy")  # without an import, its generator was never used
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


class KeptBuffers:
    """Copies of a model's buffers, such as running means, which a forward pass over a bad batch makes non-finite.

    A buffer is copied again only if its version has changed, so a large constant is copied once. Custom kernels must
    report in-place changes with `torch.autograd.graph.increment_version`.
    """

    def __init__(self, model: nn.Module, num_batches: int = 1) -> None:
        # The dict itself, here and below: access to each buffer by name takes longer than the copy.
        self.owners = [module for module in model.modules() if module._buffers]  # pyright: ignore[reportPrivateUsage]
        self._kept: deque[list[_OfModule]] = deque(maxlen=num_batches)

    def keep(self) -> None:
        if not self.owners:
            return
        latest = self._kept[-1] if self._kept else [None] * len(self.owners)
        kept: list[_OfModule] = []
        made: list[_OfModule] = []
        for owner, before in zip(self.owners, latest, strict=True):
            if before is None or not before.is_current():
                # With a single copy, its memory can be overwritten.
                before = _OfModule(owner, room=before if self._kept.maxlen == 1 else None)
                made.append(before)
            kept.append(before)
        _fill(made)
        self._kept.append(kept)

    def restore(self) -> None:
        """Restore the buffers from before the earliest batch kept, whether they were changed or replaced."""
        for of_module in self._kept[0] if self._kept else ():
            of_module.restore()


class _OfModule:
    """Buffers of one module, and copies of their values once `_fill` has made them."""

    def __init__(self, owner: nn.Module, room: "_OfModule | None") -> None:
        self._buffers = owner._buffers  # pyright: ignore[reportPrivateUsage]
        self._seen = dict(self._buffers)  # the tensor objects, since a forward pass may replace them
        self.tensors = [local_part(tensor) for tensor in self._seen.values() if tensor is not None]
        # batch_norm() changes running means without a new version, and these kinds of tensors have no versions.
        is_silent = any(t.is_inference() or hasattr(t, "to_local") for t in self._seen.values() if t is not None)
        self._changes_unseen = is_silent or "running_mean" in self._seen
        self._versions = None if self._changes_unseen else self._count()
        self.copies: list[Tensor] = []
        if room is not None and [_kind(t) for t in room.copies] == [_kind(t) for t in self.tensors]:
            self.copies = room.copies

    def is_current(self) -> bool:
        """Return whether no buffer has been changed or replaced since the copy."""
        now, seen = self._buffers, self._seen
        if self._changes_unseen or len(now) != len(seen):
            return False
        return all(now.get(name) is tensor for name, tensor in seen.items()) and self._count() == self._versions

    def restore(self) -> None:
        copy_all(self.tensors, self.copies)
        self._buffers.clear()
        self._buffers.update(self._seen)

    def _count(self) -> list[int]:
        """Return the version of each tensor, which counts its in-place changes."""
        return [tensor._version for tensor in self._seen.values() if tensor is not None]


def _fill(made: list[_OfModule]) -> None:
    """Copy the current values, into existing memory where it fits."""
    without_copies = [of_module for of_module in made if not of_module.copies]
    old = [of_module for of_module in made if of_module.copies]
    copy_all([c for of_module in old for c in of_module.copies], [t for of_module in old for t in of_module.tensors])
    copies = iter(copies_of([tensor for of_module in without_copies for tensor in of_module.tensors]))
    for of_module in without_copies:
        of_module.copies = [next(copies) for _ in of_module.tensors]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


class Snapshot:
    """Copy of weights, buffers and optimizer state; each rank copies its own shards.

    Learning rates are not included, because the schedule continues after a rollback.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._buffers = KeptBuffers(model)
        self._buffers.keep()
        self._undo_steps = StepSnapshot(optimizers, with_settings=False)

    def restore(self) -> None:
        """Restore everything. The copy can be used again."""
        self._buffers.restore()
        self._undo_steps()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself, detached; the memory is shared."""
    tensor = tensor.detach()
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # only DTensor has this method
    return tensor if to_local is None else to_local()


@torch.no_grad()
def copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy each source tensor into its target, with one kernel per pair of devices and dtypes."""
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    if to and to[0].is_cpu and source[0].is_cpu:  # copied one by one anyway
        groups[None] = to, source
    else:
        for one, other in zip(to, source, strict=True):
            targets, sources = groups[one.dtype, one.device, other.dtype, other.device]
            targets.append(one)
            sources.append(other)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]  # no public name


@torch.no_grad()
def copies_of(tensors: Sequence[Tensor], *, on_host: bool = False) -> list[Tensor]:
    """Return copies of tensors, on the host if the device has no room for them."""
    local = [local_part(tensor) for tensor in tensors]
    if not on_host:
        try:
            # All memory first, so that one call of a fused kernel copies everything.
            copies = [torch.empty_like(tensor) for tensor in local]
        except torch.OutOfMemoryError:
            on_host = True
        else:
            copy_all(copies, local)
            return copies
    return [tensor.to("cpu", copy=True) for tensor in local]
