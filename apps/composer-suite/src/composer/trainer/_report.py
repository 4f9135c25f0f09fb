"""Values that the Trainer itself logs: times, losses, metrics and facts of the run."""

import functools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any, cast

import torch

from composer.trainer import _error_context as error_context
from composer.trainer._rank_sync import BatchLosses, Ranks
from composer.trainer._regions import RecompilationMonitor
from composer.trainer._shared_results import SharedMetrics, SharedResults, compute_over_ranks
from composer_dist import get_local_world_size, get_world_size
from composer_events.logger import Logger, log_lazily
from composer_events.metric_entries import by_entry
from composer_events.state import State
from composer_models import ComposerModel, model_eval_mode
from composer_time import Timestamp

_NO_METRICS: Mapping[str, Any] = {}
_MAX_DELAY_S = 0.1  # of the progress bar, which is drawn every 0.5 s
_LONGEST_INTERVAL = 16  # of exchanges, in batches, in case that batches become slower


class TrainMetrics:
    """Updates of `state.train_metrics` with the microbatches as they were before algorithms changed them."""

    def __init__(self, state: State, model: ComposerModel) -> None:
        self._state = state
        self._model = model
        self._kept: Any = None
        self._shared: SharedMetrics | None = None
        self._is_alone = get_world_size() == 1
        # The default eval_forward returns the outputs unchanged, so switching to eval mode would have no effect.
        self._reuses_outputs = type(model).eval_forward is ComposerModel.eval_forward

    def reset(self) -> None:
        if metrics := self._state.train_metrics:
            for metric in metrics.values():
                metric.reset()

    def keep(self, microbatch: Any) -> None:
        """Keep a microbatch for `update`; algorithms may change its containers afterwards."""
        if self._state.train_metrics:
            self._kept = _copy_containers(microbatch)

    @error_context.stage("the metrics of training")
    def update(self, outputs: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """Update every metric with the kept microbatch and the model's outputs, under the training precision."""
        metrics = self._state.train_metrics
        if not metrics:
            return
        mode: AbstractContextManager[Any] = nullcontext() if self._reuses_outputs else model_eval_mode(self._model)
        with torch.no_grad(), mode, autocast():
            outputs = self._model.eval_forward(self._kept, outputs)
            for metric in metrics.values():
                self._model.update_metric(self._kept, outputs, metric)
        self._kept = None

    def compute(self) -> dict[str, Any]:
        """Return each metric over the microbatches seen so far, and store the values on the state.

        A run resumed exactly at the end of an epoch has seen none yet.
        """
        metrics = (self._state.train_metrics or {}).items()
        # compute() of torchmetrics warns before the first update.
        updated = {name: each for name, each in metrics if getattr(each, "update_called", True)}
        if self._is_alone:
            values = {name: metric.compute() for name, metric in updated.items()}
        else:
            values = compute_over_ranks(updated)
        self._state.train_metric_values.update(values)
        return values

    def shared(self) -> SharedMetrics:
        """Return the metrics as the ranks exchange them."""
        metrics = self._state.train_metrics or _NO_METRICS
        if self._shared is None or self._shared.metrics is not metrics:
            self._shared = SharedMetrics(metrics)
        return self._shared


def _copy_containers(batch: Any) -> Any:
    """Copy the dicts, lists and tuples of a batch; the tensors in them stay the same objects."""
    if isinstance(batch, Mapping):
        return {key: _copy_containers(value) for key, value in cast("Mapping[Any, Any]", batch).items()}
    if type(batch) in (list, tuple):
        return type(batch)([v if isinstance(v, torch.Tensor) else _copy_containers(v) for v in batch])
    return batch


@dataclass(slots=True, eq=False)
class Report:
    """Logging of the training loop's values, at the step of the state's timestamp."""

    _state: State
    _logger: Logger
    _metrics: TrainMetrics
    _ranks: Ranks
    _recompilations: RecompilationMonitor | None = None
    _latest: SharedResults | None = None
    _unsent: BatchLosses | None = None  # of the latest batch, if its results were not exchanged
    _num_batches: int = 0  # since the latest exchange
    _exchanged_s: float = 0.0

    def algorithms(self) -> None:
        names = {f"enabled_algorithms/{type(algorithm).__name__}": True for algorithm in self._state.algorithms}
        self._logger.log_hyperparameters(names)
        if self._recompilations is not None:
            self._recompilations.begin()

    def epoch(self) -> None:
        self._logger.log_metrics({"time/epoch": self._state.timestamp.num_epochs})

    def time(self) -> None:
        if self._logger.destinations:
            log_lazily(self._state, self._logger, _times)
            self._log_tokens()

    def epoch_and_time(self) -> None:
        """Log the end of training, and compute the metrics of the latest batch if they have not been computed yet."""
        self._exchange_rest()
        if self._latest is None and not self._ranks.listen:
            self._metrics.compute()
        if self._state.pending_results is not None:
            self._state.pending_results()
        self._state.pending_results = self._latest = None
        now = self._state.timestamp
        self._logger.log_metrics({"time/epoch": now.num_epochs, **_times(now)})
        self._log_tokens()

    def batch(self, losses: BatchLosses) -> None:
        """Log the losses and metrics of a batch, as tensors on the device.

        The ranks exchange them if any has a destination or a listener; if that is only the progress bar, they exchange
        those of some batches, and the last ones of an epoch. Only destinations that read a number wait for the device
        or for other ranks.
        """
        state, logger = self._state, self._logger
        if self._recompilations is not None:
            self._recompilations.look(state, logger)
        if logger.destinations:
            log_lazily(state, logger, _cut, state.device_train_microbatch_size, state.grad_accum)
        if not self._ranks.shares_results:
            state.pending_results = functools.partial(_store_means, state, losses)
            if logger.destinations:
                log_lazily(state, logger, _means, losses, replaces=losses.names)
            self.metrics()
            return
        self._num_batches += 1
        if self._latest is not None:
            self._latest.finish()  # on every rank, now that it costs no wait
            if self._num_batches < self._latest.interval and not self._ranks.reads_each_batch:
                self._unsent = losses
                return
        self._exchange(losses)
        if logger.destinations:
            self.metrics()

    def _exchange(self, losses: BatchLosses) -> None:
        before, state = self._latest, self._state
        interval = None if self._ranks.reads_each_batch else self._next_interval()
        self._latest = SharedResults(state, self._ranks.losses, self._metrics.shared(), losses, interval)
        if before is not None and not self._latest.has_all_metrics:
            before.read()  # the state keeps the latest value of each metric
        state.pending_results = self._latest.read
        self._unsent, self._num_batches = None, 0
        if self._logger.destinations:
            log_lazily(state, self._logger, self._latest.losses_to_log, replaces=losses.names)

    def _exchange_rest(self) -> None:
        """Exchange the results of the latest batch, which are about to be shown. Every rank must call this."""
        if self._unsent is not None:
            self._exchange(self._unsent)

    def _next_interval(self) -> int:
        """Return the number of batches until the next exchange, which is at most twice that since the last one."""
        metrics = self._state.train_metrics or _NO_METRICS
        if not all(getattr(metric, "update_called", True) for metric in metrics.values()):
            return 1  # a metric that is seldom updated must not miss one
        now_s = time.perf_counter()
        seconds, self._exchanged_s = now_s - self._exchanged_s, now_s
        in_time = int(_MAX_DELAY_S / seconds * self._num_batches) if seconds > 0 else 1
        return max(1, min(in_time, 2 * self._num_batches, _LONGEST_INTERVAL))

    def metrics(self) -> None:
        """Log the metrics of the latest batch, at its end and again at that of the epoch."""
        self._exchange_rest()
        destinations = self._logger.destinations
        if self._latest is not None:
            if destinations:
                replaces = self._latest.names_of_metrics
                log_lazily(self._state, self._logger, self._latest.metrics_to_log, replaces=replaces)
        # `listen` is the same on every rank, as the collectives of torchmetrics require.
        elif self._ranks.listen and (destinations or self._state.train_metrics):
            values = self._metrics.compute()
            if destinations:
                self._logger.log_metrics({f"metrics/train/{name}": value for name, value in by_entry(values).items()})

    def _log_tokens(self) -> None:
        stamp = self._state.timestamp
        if stamp.num_tokens:
            self._logger.log_metrics({"time/token": stamp.num_tokens})
            self._logger.log_metrics({"time/token_in_epoch": stamp.num_tokens_in_epoch})


def _cut(now: Timestamp, size: Any, grad_accum: int | None) -> dict[str, Any]:
    del now
    counts = {} if grad_accum is None else {"trainer/grad_accum": grad_accum}
    return {"trainer/device_train_microbatch_size": size, **counts}


def _store_means(state: State, losses: BatchLosses) -> None:
    state.pending_results, state.total_loss_dict = None, losses.means()


def _means(now: Timestamp, losses: BatchLosses) -> dict[str, Any]:
    del now
    return losses.means()


def _times(now: Timestamp) -> dict[str, int]:
    return {
        "time/batch": now.num_batches,
        "time/sample": now.num_samples,
        "time/batch_in_epoch": now.num_batches_in_epoch,
        "time/sample_in_epoch": now.num_samples_in_epoch,
    }


def log_run_facts(state: State, logger: Logger) -> None:
    """Log versions, machines and the seed, in one call each as Composer does."""
    processes = f"num_{state.device.name}s_per_node"
    unknown = "unknown because NODENAME environment variable not set"
    logger.log_hyperparameters({"composer_version": metadata.version("composer-suite")})
    logger.log_hyperparameters({"composer_commit_hash": "None"})
    logger.log_hyperparameters(
        {
            "num_nodes": get_world_size() // get_local_world_size(),
            processes: get_local_world_size(),
            "node_name": os.environ.get("NODENAME", unknown),
        }
    )
    logger.log_hyperparameters({"rank_zero_seed": state.rank_zero_seed})
