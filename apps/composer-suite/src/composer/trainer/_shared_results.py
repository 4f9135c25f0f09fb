"""Losses and metrics over all ranks, in one collective for all of them.

torchmetrics gathers each state of each metric by itself, with a barrier and up to two collectives. Here all states are
gathered together, and torchmetrics reduces the gathered states as its own, so that values are the same to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from composer_dist import get_world_size
from composer_dist.ddp import start_gather
from composer_events.metric_entries import by_entry

if TYPE_CHECKING:
    from composer.trainer._rank_sync import LossMeans
    from composer_events.state import State
    from composer_time import Timestamp


def can_gather(metric: Any) -> bool:
    """Return whether a metric's states can be gathered with those of others, as is the same on all ranks.

    They cannot if one is a list, whose length may differ between the ranks, if another metric is inside of this one, or
    if the metric synchronizes in its own way.
    """
    from torchmetrics import Metric  # a slow import, already paid for where there are metrics
    from torchmetrics.metric import jit_distributed_available

    if get_world_size() == 1 or not isinstance(metric, Metric):
        return False
    kind, usual = cast(Any, type(metric)), cast(Any, Metric)
    return (
        kind.sync is usual.sync
        and kind._sync_dist is usual._sync_dist  # the part of it that subclasses override
        and metric.sync_on_compute
        and metric.dist_sync_fn is None
        and metric.process_group is None
        and metric.distributed_available_fn is jit_distributed_available
        and not any(isinstance(state, list) for state in metric.metric_state.values())
        and sum(isinstance(part, Metric) for part in metric.modules()) == 1
    )


class _Gathered:
    """A `dist_sync_fn` for a metric, which returns states that were gathered before.

    Args:
        get_states: Returns the gathered states, each with a first dim for the rank.
    """

    def __init__(self, get_states: Callable[[], Sequence[Tensor]]) -> None:
        self._get_states = get_states
        self._num_calls = 0

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Return the next state of each rank."""
        states = self._get_states()
        self._num_calls += 1
        return list(states[(self._num_calls - 1) % len(states)].unbind())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the metric, or one in a file, gathers its states by itself


def compute_over_ranks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Compute metrics over all ranks. Every rank must call this."""
    together = {name: metric for name, metric in metrics.items() if can_gather(metric)}
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


class SharedMetrics:
    """The metrics of training, whose states the ranks exchange after each batch.

    They are computed by copies of the metrics, since the metrics themselves may count the next batch by then.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = metrics
        self.together = {name: metric for name, metric in metrics.items() if can_gather(metric)}
        self._copies = copy.deepcopy(self.together)

    def use(self, states: Callable[[str], Sequence[Tensor]]) -> None:
        """Make `compute` of the metrics use the gathered states until `release`."""
        for name, metric in self.together.items():
            metric.dist_sync_fn = _Gathered(partial(states, name))

    def release(self) -> None:
        """Make the metrics gather their states by themselves again, before they are reset."""
        for metric in self.together.values():
            metric.dist_sync_fn = None

    def compute(self, name: str, num_updates: int, states: Sequence[Tensor]) -> Any:
        """Compute a metric from the states of all ranks."""
        metric: Any = self._copies[name]
        # torchmetrics has no public way to compute from states that its own updates have not made.
        metric._computed, metric._update_count = None, num_updates
        metric.dist_sync_fn = _Gathered(lambda: states)
        return metric.compute()


class SharedResults:
    """Losses and metrics of a batch over all ranks, by one collective that runs beside the next step.

    Every rank must create one for each batch, after reading that of the batch before. A rank that needs the results
    earlier waits for them alone.
    """

    def __init__(self, state: State, means: LossMeans, metrics: SharedMetrics, losses: Mapping[str, Tensor]) -> None:
        self._state, self._means, self._metrics, self._own_losses = state, means, metrics, losses
        own = means.begin(losses)
        self._num_of_losses = len(own)
        self._places, states = _states_of(metrics.together)
        self._num_updates = {name: metric.update_count for name, metric in metrics.together.items()}
        self._gathered = start_gather(own + states)
        metrics.use(self._states)
        self._losses: dict[str, Any] = {}
        self._values: dict[str, Any] = {
            name: None if name in metrics.together else metric.compute()
            for name, metric in metrics.metrics.items()
            if getattr(metric, "update_called", True)  # compute() of torchmetrics warns before the first update
        }
        self._lock, self._is_read = RLock(), False  # a destination may read from a thread

    def read(self) -> None:
        """Wait for the results, and store them on the state."""
        with self._lock:
            if self._is_read:
                return
            self._is_read = True  # first, since the properties of the state call this
            self._losses = self._means.end(self._own_losses, self._gathered()[: self._num_of_losses])
            for name in self._values.keys() & self._places.keys():
                self._values[name] = self._metrics.compute(name, self._num_updates[name], self._states(name))
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
        return self._gathered()[self._num_of_losses :][self._places[name]]
