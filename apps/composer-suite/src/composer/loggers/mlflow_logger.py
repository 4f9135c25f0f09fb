"""Runs in MLflow."""

import fnmatch
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from composer.loggers._service_queue import (
    PATIENCE_S,
    PixelsAndMasks,
    QueuedLogger,
    as_number,
    fatal_error,
    id_of_uncaught,
    open_on_ranks,
    require,
)
from composer_dist import get_global_rank
from composer_events.arguments import check_counts, check_flags, check_seconds, check_text_lists
from composer_events.hparams import convert_nested_dict_to_flat_dict
from composer_events.logger import Logger
from composer_events.state import State

__all__ = ["MLFlowLogger"]

_UNITY_CATALOG = "databricks-uc"


# MLflow's limits for one request.
_MOST_METRICS = 1000
_MOST_PARAMS = 100

_INVALID = "INVALID_PARAMETER_VALUE"  # MLflow's error code for an invalid metric name

# Environment variables that make MLflow's client try once. By default it retries for minutes.
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


def _create_experiment(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException  # already loaded, with the client

    try:
        return client.create_experiment(name)
    except MlflowException:  # another process may have created it in the meantime
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


_DEFAULT_EXPERIMENT = "my-mlflow-experiment"
_SYSTEM_METRICS = {
    "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "5",
    "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "6",
}


class MLFlowLogger(QueuedLogger):
    """Logger for MLflow: hyperparameters, metrics, tables and images without masks. It also registers models.

    Metrics are buffered and sent in order by a separate thread. While a Trainer is open, its run is MLflow's active run
    in the main thread, so that calls such as `mlflow.log_artifact` use it. The hyperparameters `mlflow_experiment_id`
    and `mlflow_run_id` are added.

    Args:
        experiment_name: The experiment, created if it does not exist. By default the environment variable
            `MLFLOW_EXPERIMENT_NAME`, or `'my-mlflow-experiment'`. `MLFLOW_EXPERIMENT_ID` takes precedence.
        run_name: The name of the run; by default the `run_name` of the Trainer. If every rank has a run, `-rank<r>` is
            added. The environment variable `MLFLOW_RUN_ID` selects a run to continue.
        tags: Tags of the run. `run_name` is always added: the environment variable `RUN_NAME` or the Trainer's name.
        tracking_uri: The URI of the server or database, such as `'sqlite:///mlflow.db'`. By default `'databricks'` if
            `DATABRICKS_TOKEN` is set, else MLflow's default.
        rank_zero_only: Whether only rank 0 logs. Otherwise each rank has a run.
        flush_interval: The number of batches between checks whether the buffer is old enough to be sent.
        model_registry_prefix: Prefix of the names of registered models, before a dot.
        model_registry_uri: The URI of the model registry.
        synchronous: Whether metrics are sent at once instead of buffered.
        log_system_metrics: Whether MLflow also logs system metrics: the mean of 6 readings, one every 5 s, unless the
            variables `MLFLOW_SYSTEM_METRICS_...` are set.
        rename_metrics: New names of metrics by their old names.
        ignore_metrics: Patterns of metrics to leave out, such as `'time/*'`.
        ignore_hyperparameters: Patterns of hyperparameters to leave out.
        run_group: The value of the tag `run_group`.
        resume: Whether to continue the newest run with the same tag `run_name`.
        logging_buffer_seconds: Seconds that metrics are buffered.
        log_duplicated_metric_every_n_steps: Number of steps after which an unchanged metric is logged again.
        patience_s: Seconds that the start and the end of the run wait for MLflow.

    Attributes:
        experiment_id: The id of the experiment, set on all ranks at INIT.
        run_id: The id of the run, set on all ranks at INIT; `None` if MLflow could not be reached.
        run_url: The URL of the run on Databricks, set at AFTER_LOAD.

    Raises:
        MissingConditionalImportError: If mlflow is not installed; the extra `mlflow` brings it.
        ValueError: If the registry is Unity Catalog and the prefix does not have the form `catalog.schema`.
    """

    _images_name = "image"

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        tracking_uri: str | os.PathLike[str] | None = None,
        rank_zero_only: bool = True,
        flush_interval: int = 10,
        model_registry_prefix: str = "",
        model_registry_uri: str | None = None,
        synchronous: bool = False,
        log_system_metrics: bool = True,
        rename_metrics: Mapping[str, str] | None = None,
        ignore_metrics: Sequence[str] | None = None,
        ignore_hyperparameters: Sequence[str] | None = None,
        run_group: str | None = None,
        resume: bool = False,
        logging_buffer_seconds: float = 10,
        log_duplicated_metric_every_n_steps: int = 100,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        mlflow = require("mlflow", extra="mlflow")
        check_counts(flush_interval=flush_interval)
        check_counts(0, log_duplicated_metric_every_n_steps=log_duplicated_metric_every_n_steps)
        check_seconds(may_be_zero=True, logging_buffer_seconds=logging_buffer_seconds)
        check_text_lists(ignore_metrics=ignore_metrics, ignore_hyperparameters=ignore_hyperparameters)
        check_flags(resume=resume)
        if model_registry_uri == _UNITY_CATALOG and len(model_registry_prefix.split(".")) != 2:
            raise ValueError(
                f"When registering to Unity Catalog, model_registry_prefix must be in the form catalog.schema, such as "
                f"'main.plums', and it is {model_registry_prefix!r}."
            )
        super().__init__(rank_zero_only, patience_s)
        self._mlflow = mlflow
        self._client: Any = None
        self.model_registry_prefix, self.model_registry_uri = model_registry_prefix, model_registry_uri
        if model_registry_uri is not None:
            mlflow.set_registry_uri(model_registry_uri)
        if tracking_uri is None and os.environ.get("DATABRICKS_TOKEN"):
            tracking_uri = "databricks"
        if tracking_uri is not None:
            mlflow.set_tracking_uri(str(tracking_uri))
        # The client draws its retry delays from Python's global generator on the logger's thread, which would change
        # the random numbers of data augmentation in training.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
        if log_system_metrics:
            for name, value in _SYSTEM_METRICS.items():
                os.environ.setdefault(name, value)  # MLflow's own setters also set these variables
        self.tracking_uri: str = mlflow.get_tracking_uri()
        self.experiment_name = _on_databricks(
            experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_EXPERIMENT, self.tracking_uri
        )
        self.run_name, self.tags, self.run_group, self.resume = run_name, dict(tags or {}), run_group, resume
        self.rank_zero_only, self.flush_interval, self.synchronous = rank_zero_only, flush_interval, synchronous
        self.log_system_metrics, self.logging_buffer_seconds = log_system_metrics, logging_buffer_seconds
        self.rename_metrics = dict(rename_metrics or {})
        self.ignore_metrics, self.ignore_hyperparameters = ignore_metrics or (), ignore_hyperparameters or ()
        self.log_duplicated_metric_every_n_steps = log_duplicated_metric_every_n_steps
        self.experiment_id: str | None = None
        self.run_id: str | None = None
        self.run_url: str | None = None
        self._id_of_uncaught = id_of_uncaught()
        # These belong to the outbox's thread.
        self._metrics_cache: dict[str, tuple[float, int]] = {}
        self._buffered: list[Any] = []
        self._buffered_since_s = 0.0
        self._refused: set[str] = set()  # names of metrics

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log hyperparameters."""
        if not self._enabled:
            return
        flat = convert_nested_dict_to_flat_dict(hyperparameters)
        super().log_hyperparameters({k: v for k, v in flat.items() if not _matches(k, self.ignore_hyperparameters)})

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log metrics at a step. Values that are not numbers are left out."""
        if not self._enabled:
            return
        wanted = {name: value for name, value in metrics.items() if not _matches(name, self.ignore_metrics)}
        # The time is taken here, since the values may be sent much later.
        self._post(self._gather, wanted, step or 0, int(time.time() * 1000))

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table as the artifact `<name>.json`."""

        def send(values: dict[str, Any]) -> None:
            frame = require("pandas", extra="mlflow").DataFrame(values["rows"], columns=list(columns))
            self.client.log_table(run_id=self.run_id, data=frame, artifact_file=f"{name}.json")

        self._post(send, {"rows": [list(row) for row in rows]})

    def init(self, state: State, logger: Logger) -> None:
        """Start or continue the run. Every rank must call this."""
        self.run_name = self.run_name or state.run_name
        if not self.rank_zero_only and not self.run_name.endswith(suffix := f"-rank{get_global_rank()}"):
            self.run_name += suffix
        self.tags["run_name"] = os.environ.get("RUN_NAME") or state.run_name
        if self.run_group:
            self.tags["run_group"] = self.run_group
        begun = open_on_ranks(self._outbox, self._begin, is_enabled=self._enabled)
        own = begun[get_global_rank()] or begun[0]  # ranks that do not log get the ids of rank 0
        if own is None:
            return
        self.experiment_id, self.run_id = own
        if self._enabled:
            self._activate()

    def after_load(self, state: State, logger: Logger) -> None:
        """Log the ids of the experiment and the run."""
        if self.run_id is None:
            return
        logger.log_hyperparameters({"mlflow_experiment_id": self.experiment_id, "mlflow_run_id": self.run_id})
        if host := os.environ.get("DATABRICKS_HOST"):
            self.run_url = f"{host.rstrip('/')}/ml/experiments/{self.experiment_id}/runs/{self.run_id}"

    def batch_end(self, state: State, logger: Logger) -> None:
        """Send the buffer if it is old enough, at the interval."""
        if self._enabled and state.timestamp.num_batches % self.flush_interval == 0:
            self._outbox.post(self._send_if_due, is_kept=True)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Send the buffer."""
        self._send()

    epoch_end = eval_end

    def fit_end(self, state: State, logger: Logger) -> None:
        """Send the buffer, and wait until it has been sent."""
        self._send()
        self._outbox.drain()

    def post_close(self) -> None:
        """End the run, as failed after an exception, and wait until all values have been sent."""
        if not self._enabled:
            return
        # In an interactive session, an uncaught error has not ended the process, and may be unrelated.
        is_script = not hasattr(sys, "ps1")
        error = fatal_error(was_busy=is_script, id_of_earlier=self._id_of_uncaught)
        status = "FINISHED" if error is None else "FAILED"
        self._send()
        # A service that is known to be down gets no retries below, which would delay the exit by minutes.
        is_well = self._outbox.drain() and not self._outbox.num_errors
        self._outbox.close(lambda: self.client.set_terminated(self.run_id, status))
        active = self._mlflow.active_run()
        if active is None or active.info.run_id != self.run_id:
            return
        try:
            # `set_terminated` ends the run, and this ends its role as the active run of this thread.
            with nullcontext() if is_well else _impatiently():
                self._mlflow.end_run(status)
        except Exception as error:
            if is_well:  # otherwise, a warning was already issued
                text = f"MLFlowLogger could not end run {self.run_id}: {type(error).__name__}: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    @property
    def client(self) -> Any:
        """The `MlflowClient`, created on first use."""
        if self._client is None:
            self._client = self._mlflow.MlflowClient(self._mlflow.get_tracking_uri(), self.model_registry_uri)
        return self._client

    def register_model(
        self, model_uri: str, name: str, await_registration_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a logged model, and return its version.

        Args:
            model_uri: The URI of the model, as returned by `log_model`.
            name: The name without the prefix.
            await_registration_for: Seconds to wait until it is ready.
            tags: Tags of the version.
        """
        full_name = self._registered_name(name)
        return self._mlflow.register_model(
            model_uri, full_name, await_registration_for=await_registration_for, tags=tags
        )

    def register_model_with_run_id(
        self, model_uri: str, name: str, await_creation_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a model as a result of this run, and return its version.

        Args:
            model_uri: The URI of its files.
            name: The name without the prefix.
            await_creation_for: Seconds to wait until it is ready.
            tags: Tags of the version.
        """
        from mlflow.exceptions import MlflowException  # already loaded
        from mlflow.protos.databricks_pb2 import ALREADY_EXISTS, RESOURCE_ALREADY_EXISTS, ErrorCode

        full_name = self._registered_name(name)
        try:
            self.client.create_registered_model(full_name)
        except MlflowException as error:
            if error.error_code not in {ErrorCode.Name(ALREADY_EXISTS), ErrorCode.Name(RESOURCE_ALREADY_EXISTS)}:
                raise
        return self.client.create_model_version(
            name=full_name,
            source=model_uri,
            run_id=self.run_id,
            await_creation_for=await_creation_for,
            tags=tags,
        )

    def save_model(self, flavor: str, **kwargs: Any) -> None:
        """Save a model in MLflow's format.

        Args:
            flavor: `'transformers'`.
            **kwargs: The arguments of `mlflow.transformers.save_model`.

        Raises:
            NotImplementedError: If the flavor is another one.
        """
        self._flavor(flavor).save_model(**kwargs)

    def log_model(self, flavor: str, **kwargs: Any) -> Any:
        """Log a model with the run, and return MLflow's description of it, with its `model_uri`.

        Args:
            flavor: `'transformers'`.
            **kwargs: The arguments of `mlflow.transformers.log_model`.

        Raises:
            NotImplementedError: If the flavor is another one.
        """
        return self._flavor(flavor).log_model(**kwargs)

    def _flavor(self, flavor: str) -> Any:
        if flavor != "transformers":
            raise NotImplementedError(f"flavor={flavor!r} cannot be saved. Use 'transformers'.")
        return self._mlflow.transformers

    def _registered_name(self, name: str) -> str:
        return f"{self.model_registry_prefix}.{name}" if self.model_registry_prefix else name

    def _activate(self) -> None:
        """Make the run the active run of this thread."""
        try:
            self._mlflow.start_run(run_id=self.run_id, tags=self.tags, log_system_metrics=self.log_system_metrics)
        except Exception as error:
            warnings.warn(
                f"MLFlowLogger logs to run {self.run_id}, but could not make it the active run: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _begin(self) -> tuple[str, str]:
        """Return the ids of the experiment and the run, which are created if they do not exist."""
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment_id is None:
            experiment = self.client.get_experiment_by_name(self.experiment_name)
            experiment_id = (
                _create_experiment(self.client, self.experiment_name)
                if experiment is None
                else experiment.experiment_id
            )
        run_id = os.environ.get("MLFLOW_RUN_ID")
        if run_id is None and self.resume:
            # By tag, since users may rename runs in MLflow.
            wanted = "tags.run_name = '{}'".format(self.tags["run_name"].replace("'", "\\'"))
            newest = ["attributes.start_time DESC"]
            found = self.client.search_runs([experiment_id], wanted, max_results=1, order_by=newest)
            run_id = found[0].info.run_id if found else None
        if run_id is None:
            texts = {name: str(value) for name, value in self.tags.items()}
            run_id = self.client.create_run(experiment_id, run_name=self.run_name, tags=texts).info.run_id
        self.run_id, self._metrics_cache = run_id, {}
        self._buffered, self._refused = [], set()
        return experiment_id, run_id

    def _send_hyperparameters(self, values: dict[str, Any]) -> None:
        from mlflow.entities import Param  # already loaded, with the client

        self._log_batch("params", [Param(name, str(value)) for name, value in values.items()], _MOST_PARAMS)

    def _check_images(self, name: str, num_channels: set[int], has_masks: bool) -> None:
        if has_masks:
            warnings.warn(
                f"masks and mask_class_labels of the images {name!r} are left out: MLflow shows none. Log the masks as "
                f"images, or give the Trainer a WandBLogger or CometMLLogger as well.",
                stacklevel=3,
            )
        if others := num_channels - {1, 3, 4}:
            raise ValueError(
                f"the images {name!r} have {min(others)} channels. MLflow shows 1, 3 or 4. Is channels_last right?"
            )

    def _send_images(
        self, images: PixelsAndMasks, name: str, step: int | None, labels: dict[int, str] | None, use_table: bool
    ) -> None:
        for index, (image, _) in enumerate(images):
            self.client.log_image(image=image, key=f"{name}_{index}", run_id=self.run_id, step=step or 0)

    def _gather(self, values: dict[str, Any], step: int, logged_at_ms: int) -> None:
        from mlflow.entities import Metric  # already loaded, with the client

        for name, value in values.items():
            number = as_number(value)
            if number is None:
                continue
            before = self._metrics_cache.get(name)
            if before and before[0] == number and step < before[1] + self.log_duplicated_metric_every_n_steps:
                continue
            self._metrics_cache[name] = (number, step)
            name = self.rename_metrics.get(name, name)
            if name not in self._refused:
                self._buffered_since_s = self._buffered_since_s if self._buffered else time.monotonic()
                self._buffered.append(Metric(name, number, logged_at_ms, step))
        self._send_if_due()

    def _send_if_due(self) -> None:
        """Send the buffer if it is old enough or fills a request."""
        age_s = time.monotonic() - self._buffered_since_s
        is_old = bool(self._buffered) and (self.synchronous or age_s >= self.logging_buffer_seconds)
        if is_old or len(self._buffered) >= _MOST_METRICS:
            self._send_buffer()

    def _send_buffer(self) -> None:
        # Emptied first: after an error, the same values must not be sent again with the next ones.
        metrics, self._buffered = self._buffered, []
        self._log_batch("metrics", metrics, _MOST_METRICS)

    def _log_batch(self, kind: str, items: list[Any], most: int) -> None:
        """Send items in as few requests as possible.

        MLflow rejects a whole request because of one invalid metric name or, in a resumed run, one changed parameter.
        The items of such a request are then sent by name. A metric that is rejected again is no longer sent.

        Raises:
            MlflowException: The first error, after all other items are sent.
        """
        from mlflow.exceptions import MlflowException  # already loaded, with the client

        errors: list[Exception] = []
        for start in range(0, len(items), most):
            part = items[start : start + most]
            try:
                self.client.log_batch(self.run_id, **{kind: part})
            except MlflowException as error:
                if kind == "metrics" and error.error_code != _INVALID:
                    raise
            else:
                continue
            for name in dict.fromkeys(item.key for item in part):
                try:
                    self.client.log_batch(self.run_id, **{kind: [item for item in part if item.key == name]})
                except MlflowException as error:
                    if kind == "metrics":
                        if error.error_code != _INVALID:
                            raise
                        self._refused.add(name)
                    errors.append(error)
        if errors:
            raise errors[0]

    def _send(self) -> None:
        if self._enabled:
            self._outbox.post(self._send_buffer, is_kept=True)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _on_databricks(experiment_name: str, tracking_uri: str) -> str:
    """Return the experiment's name. On Databricks names are paths, and this one is put in the user's folder."""
    if tracking_uri != "databricks" or experiment_name.startswith(("/Users/", "/Shared/")):
        return experiment_name
    client = require("databricks.sdk", extra="mlflow").WorkspaceClient()
    return f"/Users/{client.current_user.me().user_name}/{experiment_name.strip('/')}"
