"""Run metadata on the MosaicML platform."""

import fnmatch
import logging
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Final

from composer._client_names import RUN_NAME_ENV_VAR
from composer_dist import get_global_rank
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination
from composer_events.state import State
from composer_time import TimeUnit

__all__ = [
    "MOSAICML_ACCESS_TOKEN_ENV_VAR",
    "MOSAICML_PLATFORM_ENV_VAR",
    "RUN_NAME_ENV_VAR",
    "MosaicMLLogger",
    "exception_to_json_serializable_dict",
    "format_data_to_json_serializable",
]

# Scripts read these environment variables to detect the platform.
MOSAICML_PLATFORM_ENV_VAR: Final = "MOSAICML_PLATFORM"
MOSAICML_ACCESS_TOKEN_ENV_VAR: Final = "MOSAICML_ACCESS_TOKEN_FILE"

_PREFIX = "mosaicml/"

_log = logging.getLogger("composer.loggers.mosaicml_logger")


class MosaicMLLogger(LoggerDestination):
    """Logger that writes metrics, hyperparameters and progress to the metadata of a run on the MosaicML platform.

    The Trainer adds one if the environment variables `MOSAICML_PLATFORM` (`true`) and `MOSAICML_ACCESS_TOKEN_FILE` are
    set. Only rank 0 sends, through the platform's client (`pip install mosaicml-cli`), and only if `RUN_NAME` names the
    run. Otherwise the logger warns and does nothing.

    Args:
        log_interval: Minimum seconds between messages, except at the end of an evaluation or of training.
        ignore_keys: Glob patterns of names to leave out, such as `'metrics/*'`.
        ignore_exceptions: Whether to log errors of the platform's client instead of raising them.

    Attributes:
        run_name: The run's name on the platform, or `None`.
        buffered_metadata: The values of the next message, by name.
    """

    def __init__(
        self, log_interval: int = 60, ignore_keys: Iterable[str] | None = None, ignore_exceptions: bool = True
    ) -> None:
        self.log_interval = log_interval
        self.ignore_keys = list(ignore_keys or ())
        self.ignore_exceptions = ignore_exceptions
        self.run_name = os.environ.get(RUN_NAME_ENV_VAR)
        self.buffered_metadata: dict[str, Any] = {}
        self._time_sent = 0.0
        self._client: Any = None
        if self.run_name is None:
            warnings.warn(f"MosaicMLLogger logs nothing: {RUN_NAME_ENV_VAR} does not name a run.", stacklevel=2)
        elif get_global_rank() == 0:
            try:
                self._client = import_module("mcli")
            except ImportError as error:
                warnings.warn(f"MosaicMLLogger logs nothing: {error}. Run pip install mosaicml-cli.", stacklevel=2)
        self._enabled = self._client is not None

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Add hyperparameters to the next message."""
        self._log_metadata(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Add metrics to the next message, which contains the latest value of each."""
        del step
        self._log_metadata(metrics)

    def log_exception(self, exception: BaseException) -> None:
        """Send the error that ends the run."""
        self._log_metadata({"exception": exception_to_json_serializable_dict(exception)}, now=True)

    def after_load(self, state: State, logger: Logger) -> None:
        """Send the path of the checkpoint and the URLs of other loggers."""
        pages = {
            "wandb/run_url": os.environ.get("WANDB_RUN_URL"),
            "mlflow/run_url": os.environ.get("MLFLOW_RUN_URL"),
            "checkpoint_resumed_path": state.load_path,
        }
        known = {name: value for name, value in pages.items() if value}
        self._log_metadata({"model_initialized_time": time.time(), **known}, now=True)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Send the start time of training."""
        self._log_metadata({"train_started_time": time.time(), **_progress(state)}, now=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Send the progress, at most once per interval."""
        if self._enabled:
            self._log_metadata(_progress(state), now=time.time() - self._time_sent > self.log_interval)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Add the progress to the next message."""
        self._log_metadata(_progress(state))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Send the values logged since the last message."""
        self._log_metadata({}, now=True)

    predict_end = close = eval_end

    def fit_end(self, state: State, logger: Logger) -> None:
        """Send the end time of training."""
        self._log_metadata({"train_finished_time": time.time(), **_progress(state)}, now=True)

    def _log_metadata(self, metadata: Mapping[str, Any], *, now: bool = False) -> None:
        if not self._enabled:
            return
        for name, value in metadata.items():
            if not any(fnmatch.fnmatch(name, pattern) for pattern in self.ignore_keys):
                self.buffered_metadata[_PREFIX + name] = value
        if not now or not self.buffered_metadata:
            return
        # Converted only when sent, because reading a tensor synchronizes with its device.
        data = {name: format_data_to_json_serializable(value) for name, value in self.buffered_metadata.items()}
        self.buffered_metadata, self._time_sent = {}, time.time()
        try:
            self._client.update_run_metadata(self.run_name, data, future=True, protect=True)
        except Exception:
            if not self.ignore_exceptions:
                raise
            _log.warning("The metadata of this run could not be sent to the MosaicML platform.", exc_info=True)


def format_data_to_json_serializable(data: Any) -> Any:
    """Convert data for JSON: tensors to numbers or lists, and other objects to text."""
    if data is None or isinstance(data, str | int | float | bool):
        return data
    try:
        if hasattr(data, "tolist"):  # a tensor or an array
            return data.tolist()
        if isinstance(data, Mapping):
            return {str(key): format_data_to_json_serializable(value) for key, value in data.items()}
        if isinstance(data, Iterable) and not isinstance(data, bytes):
            return [format_data_to_json_serializable(value) for value in data]
        return str(data)
    except Exception as error:
        return f"{type(data).__name__} cannot be shown: {error}"


def exception_to_json_serializable_dict(exc: BaseException) -> dict[str, Any]:
    """Return the class, message and public attributes of an exception, converted for JSON."""
    names = [name for name in dir(exc) if not name.startswith("_") and not callable(getattr(exc, name, None))]
    attributes = {name: format_data_to_json_serializable(getattr(exc, name, None)) for name in names}
    return {"class": type(exc).__name__, "message": str(exc), "attributes": attributes}


def _progress(state: State) -> dict[str, str]:
    """Return the progress in the unit of the training's duration, and within an epoch in batches."""
    duration, now = state.max_duration, state.timestamp
    assert duration is not None, "the Trainer sets it before FIT_START"
    if duration.unit in (TimeUnit.TOKEN, TimeUnit.BATCH):
        name = "token" if duration.unit == TimeUnit.TOKEN else "batch"
        return {"training_progress": f"[{name}={now.get(duration.unit).value}/{duration.value}]"}
    whole = f"/{duration.value}" if duration.unit == TimeUnit.EPOCH else ""
    of_epoch = f"/{state.dataloader_len.value}" if state.dataloader_len is not None else ""
    return {
        "training_progress": f"[epoch={now.epoch.value}{whole}]",
        "training_sub_progress": f"[batch={now.batch_in_epoch.value}{of_epoch}]",
    }
