"""Losses and metrics over all ranks, in one collective for all of them.

torchmetrics gathers each state of each metric by itself, with a barrier and up to two collectives. Here all states are
gathered together, and torchmetrics reduces the gathered states as its own, so that values are the same to the last bit.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from composer.trainer._arguments import user_stacklevel
from composer_dist import get_world_size
from composer_dist.agreement import check_agreement
from composer_dist.ddp import start_gather, sum_counts
from composer_events.metric_entries import by_entry

if TYPE_CHECKING:
    from composer.trainer._rank_sync import BatchLosses, LossMeans
    from composer_events.state import State
    from composer_time import Timestamp


def gathered_together(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics whose states can be gathered in one collective. Every rank must call this.

    The result has the same names on all ranks. It excludes metrics with a state whose shape or dtype has changed on a
    rank, since it may differ between the ranks.

    Raises:
        RankDisagreementError: If the ranks have different metrics.
    """
    if get_world_size() == 1 or not metrics:
        return {}
    together = {name: metric for name, metric in metrics.items() if _can_gather(metric)}
    check_agreement({f"metric {name}": _layout(metric._defaults) for name, metric in together.items()})
    num_changed = sum_counts([int(_has_changed(metric)) for metric in together.values()]) if together else []
    return {name: metric for (name, metric), num in zip(together.items(), num_changed, strict=True) if num == 0}


def _can_gather(metric: Any) -> bool:
    """Return whether all states are tensors, and torchmetrics synchronizes them as usual. All ranks agree on it."""
    from torchmetrics import Metric  # a slow import, already paid for where there are metrics
    from torchmetrics.metric import jit_distributed_available

    if not isinstance(metric, Metric):
        return False
    kind, usual = cast(Any, type(metric)), cast(Any, Metric)
    return (
        kind.sync is usual.sync
        and kind._sync_dist is usual._sync_dist  # the part of it that subclasses override
        and metric.sync_on_compute
        and (metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _Gathered))
        and metric.process_group is None
        and metric.distributed_available_fn is jit_distributed_available
        and not any(isinstance(default, list) for default in cast(Any, metric)._defaults.values())
        and sum(isinstance(part, Metric) for part in metric.modules()) == 1
    )


def _layout(states: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (tuple(state.shape), state.dtype, state.device.type) for name, state in states.items()}


def _has_changed(metric: Any) -> bool:
    return any(
        state.shape != default.shape or state.dtype != default.dtype or state.device != default.device
        for state, default in zip(metric.metric_state.values(), metric._defaults.values(), strict=True)
    )


class _Gathered:
    """A `dist_sync_fn` for a metric, which returns states that were gathered before.

    Args:
        get_states: Returns the gathered states, each with a first dim for the rank; `None` if they are out of date.
    """

    def __init__(self, get_states: Callable[[], Sequence[Tensor] | None]) -> None:
        self._get_states = get_states
        self._num_calls = 0

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Return the next state of each rank."""
        states = self._get_states()
        if states is None:
            from torchmetrics.utilities.distributed import gather_all_tensors

            return gather_all_tensors(state, group)
        self._num_calls += 1
        return list(states[(self._num_calls - 1) % len(states)].unbind())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the metric, or one in a file, gathers its states by itself


def compute_over_ranks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Compute metrics over all ranks. Every rank must call this."""
    together = gathered_together(metrics)
    if together:
        places, states = _states_of(together)
        gathered = start_gather(states)
        for name, metric in together.items():
            metric.dist_sync_fn = _Gathered(lambda place=places[name]: gathered()[place])
    try:
        return {name: metric.compute() for name, metric in metrics.items()}
    finally:
        for metric in together.values():
            metric.dist_sync_fn = None


def _states_of(metrics: Mapping[str, Any]) -> tuple[dict[str, slice], list[Tensor]]:
    """Return the states of metrics in torchmetrics' order, and the place of each metric's states among them."""
    places: dict[str, slice] = {}
    states: list[Tensor] = []
    for name, metric in metrics.items():
        begin = len(states)
        states += metric.metric_state.values()
        places[name] = slice(begin, len(states))
    return places, states


# Attributes that no update changes, or that belong to one object.
_OF_EVERY_METRIC = (
    {*vars(nn.Module()), "update", "compute", "dist_sync_fn", "_update_signature"}
    | {"_defaults", "_persistent", "_reductions", "_forward_cache"}
) - {"_buffers"}


class SharedMetrics:
    """The metrics of training, whose states the ranks exchange after each batch. Every rank must create one.

    They are computed by copies of the metrics, since the metrics themselves may count the next batch by then.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = metrics
        self.together = gathered_together(metrics)
        self._copies = {name: copy.copy(metric) for name, metric in self.together.items()}

    def stop_sharing(self, name: str) -> None:
        """Leave the synchronization of a metric to torchmetrics from the next batch on. Every rank must call this."""
        if self.together.pop(name, None) is not None:
            warnings.warn(
                f"A state of the metric {name!r} of training has changed its shape or dtype since the first batch, on "
                "one rank at least. The metric has no value for this batch, and is synchronized by torchmetrics from "
                "the next batch on. Use add_state() with a default of the shape and dtype of the state.",
                stacklevel=user_stacklevel(),
            )

    def compute(self, name: str, attributes: Mapping[str, Any], states: Sequence[Tensor]) -> Any:
        """Compute a metric as it was when it had these attributes, from the states of all ranks."""
        metric: Any = self._copies[name]
        metric.__dict__.update(attributes)
        metric.dist_sync_fn = _Gathered(lambda: states)
        return metric.compute()


def _attributes_of(metric: Any) -> dict[str, Any]:
    """Return the attributes of a metric that are not states. Later updates do not change their values."""
    states = metric._defaults
    return {
        name: _frozen(value)
        for name, value in metric.__dict__.items()
        if name not in _OF_EVERY_METRIC and name not in states
    }


def _frozen(value: Any) -> Any:
    """Copy tensors and containers of them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        items = copy.copy(cast("dict[Any, Any]", value))  # of the same type
        for key in items:
            items[key] = _frozen(items[key])
        return items
    if type(value) in (list, tuple, set):
        return type(value)(map(_frozen, value))
    return value


class SharedResults:
    """Losses and metrics of a batch over all ranks, by one collective that runs beside the next step.

    Every rank must create one, after finishing the one before. A rank that needs the results earlier waits for them
    alone.

    Args:
        state: The training state, on which the results are stored.
        means: The losses' averages over the ranks.
        metrics: The metrics of training.
        losses: The losses of this rank.
        next_interval: This rank's choice for `interval`; `None`, on all ranks alike, for 1.

    Attributes:
        interval: After how many batches the ranks should exchange the next results, the smallest choice of all ranks.
            It is known after `finish`.
    """

    def __init__(
        self,
        state: State,
        means: LossMeans,
        metrics: SharedMetrics,
        losses: BatchLosses,
        next_interval: int | None = None,
    ) -> None:
        self._state, self._means, self._metrics, self._own_losses = state, means, metrics, losses
        self.interval = 1
        own = means.begin(losses)
        self._num_of_losses = len(own)
        together = metrics.together
        self._attributes = {name: _attributes_of(metric) for name, metric in together.items()}
        self._places, states = _states_of(together)
        has_changed = [_has_changed(metric) for metric in together.values()]
        sent = list(states)
        for metric, place, is_changed in zip(together.values(), self._places.values(), has_changed, strict=True):
            if is_changed:
                sent[place] = metric._defaults.values()  # of the size that the other ranks expect
        facts = [torch.tensor(has_changed)] if together else []
        self._has_interval = next_interval is not None
        if next_interval is not None:
            facts.append(torch.tensor([next_interval], dtype=torch.uint8))
        self._gathered = start_gather([*own, *sent, *facts])
        for name, metric in together.items():
            get_states = functools.partial(
                self._states_if_current, name, metric.update_count, states[self._places[name]]
            )
            metric.dist_sync_fn = _Gathered(get_states)
        self._losses: dict[str, Any] = {}
        self._values: dict[str, Any] = {
            name: None if name in together else metric.compute()
            for name, metric in metrics.metrics.items()
            if getattr(metric, "update_called", True)  # compute() of torchmetrics warns before the first update
        }
        self._compute_losses: Callable[[], dict[str, Any]] | None = None
        self._lock, self._is_read = RLock(), False  # a destination may read from a thread

    @property
    def names_of_metrics(self) -> tuple[str, ...]:
        """The names of the metrics that were updated in this batch."""
        return ("metrics", *self._values)

    @property
    def has_all_metrics(self) -> bool:
        """True if every metric of the state was updated in this batch."""
        return len(self._values) == len(self._metrics.metrics)

    def finish(self) -> None:
        """Wait for the results. Every rank must call this before the results of the next batch."""
        with self._lock:
            if self._compute_losses is not None:
                return
            gathered = self._gathered()
            if self._has_interval:
                *gathered, intervals = gathered
                self.interval = int(intervals.min())
            self._compute_losses = self._means.end(self._own_losses, gathered[: self._num_of_losses])
            if not self._places:
                return
            has_changed = cast("list[bool]", gathered[-1].any(dim=0).tolist())  # pyright: ignore[reportUnknownMemberType]
            for name in list(itertools.compress(self._places, has_changed)):
                self._metrics.stop_sharing(name)
                self._values.pop(name, None)
                del self._places[name]

    def read(self) -> None:
        """Wait for the results, and store them on the state."""
        with self._lock:
            if self._is_read:
                return
            self._is_read = True  # first, since the properties of the state call this
            self.finish()
            assert self._compute_losses is not None
            self._losses = self._compute_losses()
            for name in self._values.keys() & self._places.keys():
                self._values[name] = self._metrics.compute(name, self._attributes[name], self._states(name))
            self._state.total_loss_dict = self._losses
            self._state.train_metric_values.update(self._values)

    def losses_to_log(self, now: Timestamp) -> dict[str, Any]:
        """Return the losses by their log names."""
        del now
        self.read()
        return dict(self._losses)

    def metrics_to_log(self, now: Timestamp) -> dict[str, Any]:
        """Return the metrics by their log names."""
        del now
        self.read()
        return {f"metrics/train/{name}": value for name, value in by_entry(self._values).items()}

    def _states(self, name: str) -> Sequence[Tensor]:
        """Return the states of a metric on all ranks."""
        return self._gathered()[self._num_of_losses :][self._places[name]]

    def _states_if_current(self, name: str, num_updates: int, states: Sequence[Tensor]) -> Sequence[Tensor] | None:
        metric = self._metrics.metrics[name]
        # A reset replaces the states, and an update may change them in place.
        is_current = metric.update_count == num_updates and all(map(operator.is_, metric.metric_state.values(), states))
        self.finish()
        return self._states(name) if is_current and name in self._places else None
