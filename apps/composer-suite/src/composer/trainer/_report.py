"""Values that the Trainer itself logs: times, losses, metrics and facts of the run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from composer.trainer._rank_sync import Ranks, over_their_shares
from composer.trainer._step import TrainMetrics
from composer_dist import get_local_world_size, get_world_size
from composer_events.logger import Logger, log_lazily
from composer_events.metric_entries import by_entry
from composer_events.state import State
from composer_time import Timestamp


@dataclass(slots=True, eq=False)
class Report:
    """Logging of the training loop's values, at the step of the state's timestamp."""

    _state: State
    _logger: Logger
    _metrics: TrainMetrics
    _ranks: Ranks

    def algorithms(self) -> None:
        """Log the names of the algorithms."""
        names = {f"enabled_algorithms/{type(algorithm).__name__}": True for algorithm in self._state.algorithms}
        self._logger.log_hyperparameters(names)

    def epoch(self) -> None:
        """Log the epoch that starts."""
        self._logger.log_metrics({"time/epoch": self._state.timestamp.num_epochs})

    def time(self) -> None:
        """Log the position of the batch in training."""
        if self._logger.destinations:
            log_lazily(self._state, self._logger, _times)
            self._log_tokens()

    def epoch_and_time(self) -> None:
        """Log the end of training, and compute the metrics of the latest batch if they have not been computed yet."""
        if not self._ranks.listen:
            self._metrics.compute()
        now = self._state.timestamp
        self._logger.log_metrics({"time/epoch": now.num_epochs, **_times(now)})
        self._log_tokens()

    def losses(self, losses: Mapping[str, Any]) -> None:
        """Log the losses of a batch as tensors on the device; only destinations that read a number synchronize."""
        mean = self._ranks.mean_losses if self._ranks.listen else over_their_shares
        self._state.total_loss_dict = mean(losses)
        if not self._logger.destinations:
            return
        state = self._state
        log_lazily(state, self._logger, _cut, state.device_train_microbatch_size, state.grad_accum)
        self._logger.log_metrics(state.total_loss_dict)

    def train_metrics(self) -> None:
        """Compute and log the metrics of the latest batch, if any rank has a destination or a listener."""
        # `listen` is the same on every rank, as the collectives of torchmetrics require.
        if self._ranks.listen and (self._logger.destinations or self._state.train_metrics):
            values = self._metrics.compute()
            if self._logger.destinations:
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
