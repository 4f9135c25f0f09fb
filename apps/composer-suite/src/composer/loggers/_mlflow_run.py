"""The run in MLflow that a training is logged to: how it is found or begun, filled and ended."""

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Batch", "RunSettings", "begin_run", "end_run"]

# What MLflow takes in one request.
_MOST_METRICS = 1000
_MOST_PARAMS = 100

_INVALID = "INVALID_PARAMETER_VALUE"  # what MLflow calls a name that it does not take

# By environment variable: how MLflow's client asks once, and not for minutes.
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is called and where it belongs."""

    experiment_name: str
    run_name: str
    tags: Mapping[str, Any]
    resume: bool


class Batch:
    """Values that wait to be sent in one request.

    Args:
        client: An `MlflowClient`.
        run_id: The run.
        buffer_seconds: How old the oldest one gets.
    """

    def __init__(self, client: Any, run_id: str, buffer_seconds: float) -> None:
        self._client, self._run_id, self._buffer_seconds = client, run_id, buffer_seconds
        self._metrics: list[Any] = []
        self._refused: set[str] = set()
        self._since = 0.0

    def add(self, name: str, value: float, timestamp_ms: int, step: int) -> None:
        """Let a value wait."""
        from mlflow.entities import Metric  # loaded already, with the client

        if name in self._refused:
            return
        if not self._metrics:
            self._since = time.monotonic()
        self._metrics.append(Metric(name, value, timestamp_ms, step))

    def send_if_due(self) -> None:
        """Send what waits if it has done so long enough, or fills a request."""
        is_old = bool(self._metrics) and time.monotonic() - self._since >= self._buffer_seconds
        if is_old or len(self._metrics) >= _MOST_METRICS:
            self.send()

    def send(self) -> None:
        """Send what waits.

        Raises:
            MlflowException: The first error, after all others are sent: a metric whose name MLflow does not take must
                not cost the others of its request. It is left out from then on.
        """
        from mlflow.exceptions import MlflowException  # loaded already, with the client

        metrics, self._metrics = self._metrics, []
        errors: list[Exception] = []
        for start in range(0, len(metrics), _MOST_METRICS):
            part = metrics[start : start + _MOST_METRICS]
            try:
                self._client.log_batch(self._run_id, metrics=part)
            except MlflowException as error:
                if error.error_code != _INVALID:
                    raise
                errors += self._send_by_name(part)
        if errors:
            raise errors[0]

    def _send_by_name(self, metrics: list[Any]) -> list[Exception]:
        from mlflow.exceptions import MlflowException  # loaded already, with the client

        errors: list[Exception] = []
        for name in dict.fromkeys(metric.key for metric in metrics):
            try:
                self._client.log_batch(self._run_id, metrics=[metric for metric in metrics if metric.key == name])
            except MlflowException as error:
                if error.error_code != _INVALID:
                    raise
                self._refused.add(name)
                errors.append(error)
        return errors

    def send_params(self, params: Mapping[str, Any]) -> None:
        """Send settings.

        Raises:
            MlflowException: The first error, after all others are sent: one that has another value in a run that goes
                on must not take its neighbours with it.
        """
        from mlflow.entities import Param  # loaded already, with the client
        from mlflow.exceptions import MlflowException

        several = [Param(name, str(value)) for name, value in params.items()]
        for start in range(0, len(several), _MOST_PARAMS):
            part = several[start : start + _MOST_PARAMS]
            try:
                self._client.log_batch(self._run_id, params=part)
            except MlflowException:
                self._send_one_by_one(part)

    def _send_one_by_one(self, params: list[Any]) -> None:
        errors: list[Exception] = []
        for param in params:
            try:
                self._client.log_batch(self._run_id, params=[param])
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def begin_run(client: Any, settings: RunSettings) -> tuple[str, str]:
    """Return the numbers of the experiment and of the run, which are looked for and made if there are none."""
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if experiment_id is None:
        experiment = client.get_experiment_by_name(settings.experiment_name)
        experiment_id = (
            _create_experiment(client, settings.experiment_name) if experiment is None else experiment.experiment_id
        )
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if run_id is None and settings.resume:
        named = settings.tags["run_name"].replace("'", "\\'")
        found = client.search_runs(
            [experiment_id], f"tags.run_name = '{named}'", max_results=1, order_by=["attributes.start_time DESC"]
        )
        run_id = found[0].info.run_id if found else None
    if run_id is None:
        tags = {name: str(value) for name, value in settings.tags.items()}
        run_id = client.create_run(experiment_id, run_name=settings.run_name, tags=tags).info.run_id
    return experiment_id, run_id


def end_run(mlflow: Any, run_id: str, status: str, *, is_patient: bool) -> None:
    """End the run, which is this thread's active one unless somebody has ended it already.

    Args:
        mlflow: The module.
        run_id: The run.
        status: How it has ended, in MLflow's words.
        is_patient: Whether to try again when MLflow does not answer.
    """
    active = mlflow.active_run()
    if active is None or active.info.run_id != run_id:
        return
    try:
        if is_patient:
            mlflow.end_run(status)
        else:
            with _impatiently():
                mlflow.end_run(status)
    except Exception as error:
        message = f"MLFlowLogger could not tell MLflow that run {run_id} has ended: {type(error).__name__}: {error}"
        if is_patient:  # else there has been a warning
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _create_experiment(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException  # loaded already, with the client

    try:
        return client.create_experiment(name)
    except MlflowException:  # somebody else was faster, or it cannot be made
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return experiment.experiment_id


@contextmanager
def _impatiently() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _IMPATIENT}
    os.environ.update(_IMPATIENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
