"""Progress of a run in the status of its Kubeflow TrainJob."""

import json
import logging
import os
import ssl
import threading
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from composer_dist import get_global_rank
from composer_events.arguments import check_seconds
from composer_events.callback import Callback
from composer_events.logger import Logger
from composer_events.state import State

__all__ = ["KubeflowProgress"]

_log = logging.getLogger(__name__)
# Set by the controller in the pods of a TrainJob, if its feature TrainJobRuntimeStatus is on.
_URL, _CA_CERT, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_TIMEOUT_S = 5.0


class KubeflowProgress(Callback):
    """Show the progress and the remaining time in the status of a Kubeflow TrainJob.

    Rank 0 sends them from a thread. If the controller cannot be reached, one warning is logged, and training goes on.
    In a pod without the variable `KUBEFLOW_TRAINER_SERVER_URL`, and outside of Kubernetes, nothing is sent.

    Args:
        interval_s: Seconds between two updates.

    Raises:
        TypeError: If `interval_s` is not a number.
        ValueError: If `interval_s` is negative.

    Example:
        >>> progress = KubeflowProgress(interval_s=30)

    Reference:
        Kubeflow Trainer 2.2, `UpdateTrainJobStatusRequest` of the API `trainer.kubeflow.org/v1alpha1`.
    """

    def __init__(self, interval_s: float = 10.0) -> None:
        check_seconds(may_be_zero=True, interval_s=interval_s)
        self.interval_s = interval_s
        self._is_on = self._is_warned = False
        self._start_s = self._last_s = 0.0
        self._start = 0.0
        self._sending: threading.Thread | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock."""
        self._is_on = bool(os.environ.get(_URL)) and get_global_rank() == 0
        self._start_s = self._last_s = time.monotonic()
        self._start = _fraction(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Send the progress if it is time to, and the last update has arrived."""
        if not self._is_on or time.monotonic() - self._last_s < self.interval_s:
            return
        if self._sending is None or not self._sending.is_alive():
            self._send(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Send the progress at the end, and wait for it."""
        if not self._is_on:
            return
        if self._sending is not None:
            self._sending.join()
        self._send(state)
        if self._sending is not None:
            self._sending.join()
        self._sending = None

    def _send(self, state: State) -> None:
        self._last_s, fraction = time.monotonic(), _fraction(state)
        status: dict[str, Any] = {
            "progressPercentage": int(100 * min(fraction, 1.0)),
            "metrics": [
                {"name": "epoch", "value": str(state.timestamp.num_epochs)},
                {"name": "batch", "value": str(state.timestamp.num_batches)},
            ],
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
        }
        if fraction > self._start:
            remaining_s = (self._last_s - self._start_s) * (1 - fraction) / (fraction - self._start)
            status["estimatedRemainingSeconds"] = max(0, round(remaining_s))
        self._sending = threading.Thread(target=self._post, args=(status,), name="kubeflow-progress", daemon=True)
        self._sending.start()

    def _post(self, status: dict[str, Any]) -> None:
        try:
            token = Path(os.environ[_TOKEN]).read_text(encoding="utf-8").strip()  # again, since tokens expire
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            body = json.dumps({"trainerStatus": status}).encode()
            request = urllib.request.Request(os.environ[_URL], body, headers, method="POST")
            context = ssl.create_default_context(cafile=os.environ.get(_CA_CERT))
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context):
                pass
        except (OSError, KeyError, ValueError) as error:
            if not self._is_warned:
                self._is_warned = True
                _log.warning("Kubeflow does not get the progress: %s: %s", type(error).__name__, error)


def _fraction(state: State) -> float:
    elapsed = state.get_elapsed_duration()
    return 0.0 if elapsed is None else float(elapsed.value)
