"""The folder that a run leaves: configuration, metrics, what acted when, how it ended."""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import sys
import traceback
from collections import deque
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.loggers._kept_file import KeptFile
from composer.loggers._snapshot import Snapshot, as_number
from composer.report._acting import Acting
from composer.report._run_facts import environment, profiler_times, saved_checkpoints
from composer.report._step_time import StepTime
from composer.report._undone import keep_lines
from composer.report.runs import ACTING, CONFIG, METRICS, STATUS, TIMES, read_json
from composer_dist import get_global_rank
from composer_events.event import Event
from composer_events.formatting import format_name_with_dist
from composer_events.logger_destination import LoggerDestination

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["RunRecorder"]

_log = getLogger(__name__)
_TRACES = "algorithm_traces/"
_ALL_LINES = 2**62


class RunRecorder(LoggerDestination):
    """Leaves a folder that says all about a run, for `composer report` and for other programs.

    | File | What it holds |
    |---|---|
    | `config.json` | the hyperparameters, and what the run ran on |
    | `metrics.jsonl` | a line for each call of `log_metrics`: the time in training and the values |
    | `acting.json` | which algorithm acted on which event, in which batches |
    | `times.json` | how long the parts of a step took, and the table of a profiler's `EventRecorder` |
    | `status.json` | whether the run is running, finished, stopped early or failed, and its checkpoints |
    | `report.html` | the page, at the end |

    Rank 0 writes. Values that a device is still computing are written when they are there, and nobody waits for them;
    all is written when a run ends, also by an exception. A run that is killed loses what it had not flushed.

    Args:
        folder: Where to, with the placeholders of `format_name_with_dist`.
        flush_interval: After how many batches the files are brought up to date; also at the end of each epoch.
        overwrite: Whether a folder of an earlier run may be replaced. A run that is resumed
            (`Trainer(autoresume=True)`) goes on with its folder; what was after the checkpoint is done again.
        page: Whether to write the page at the end, which needs plotly (`pip install 'composer-suite[report]'`);
            without it, the log says so.

    Attributes:
        is_resuming: Whether a folder that is there is continued. The Trainer sets it.

    Raises:
        FileExistsError: If there is such a folder, when training begins.
        ValueError: If `flush_interval` is less than 1.

    Example:
        >>> recorder = RunRecorder("runs/{run_name}", flush_interval=50)
        >>> recorder.flush_interval
        50
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "runs/{run_name}",
        *,
        flush_interval: int = 100,
        overwrite: bool = False,
        page: bool = True,
    ) -> None:
        if flush_interval < 1:
            raise ValueError(f"flush_interval={flush_interval!r} must be 1 or more: it counts batches.")
        self.folder_format = os.fspath(folder)
        self.flush_interval = flush_interval
        self.overwrite = overwrite
        self.page = page
        self.is_resuming = False
        self._state: State | None = None
        self._folder: Path | None = None
        self._metrics: KeptFile | None = None
        self._config: dict[str, Any] = {}
        self._pending: deque[tuple[dict[str, Any], Snapshot]] = deque()
        self._acting = Acting()
        self._time = StepTime()
        self._started = datetime.datetime.now(datetime.UTC).isoformat()
        self._saved_earlier: list[str] = []
        self._num_lines = 0
        self._has_ended_fit = False

    @property
    def folder(self) -> Path:
        """Where the files are.

        Raises:
            RuntimeError: Before `Event.INIT`, since the name of the run is not known.
        """
        if self._folder is None:
            raise RuntimeError(
                f"The folder {self.folder_format!r} has no name before Event.INIT, when the run gets its own."
            )
        return self._folder

    def state_dict(self) -> dict[str, Any]:
        """Return how far this run's files are, for one that is resumed from the checkpoint that is being written."""
        self._write_pending(waits=True)
        if self._metrics is not None:
            self._metrics.sync()
        return {
            "num_lines": self._num_lines,
            "acting": copy.deepcopy(self._acting.as_dict()),
            "step_s": dict(self._time.seconds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there if this is a resumed run, and not another one that begins with a checkpoint's weights."""
        if not self.is_resuming or not state:
            return
        self._num_lines = state["num_lines"]
        self._acting.restore(state["acting"])
        self._time.seconds |= state["step_s"]

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Look at the clock, and do what there is to do on the event."""
        if get_global_rank() != 0:
            return
        self._time.see(event)
        super().run_event(event, state, logger)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep the settings of the run."""
        self._config.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep values, with the time that they belong to."""
        if self._state is None or get_global_rank() != 0:
            return
        stamp = self._state.timestamp
        when = {
            "batch": int(stamp.batch) if step is None else step,
            "epoch": int(stamp.epoch),
            "sample": int(stamp.sample),
            "token": int(stamp.token),
            "time_s": stamp.total_wct.total_seconds(),
        }
        self._pending.append((when, Snapshot(metrics)))

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Keep which algorithms acted."""
        if self._state is None:
            return
        for name in traces:
            if name.startswith(_TRACES):
                algorithm, _, event = name.removeprefix(_TRACES).rpartition("/")
                self._acting.add(f"{algorithm} on {event.rpartition('.')[2].lower()}", int(self._state.timestamp.batch))

    def init(self, state: State, logger: Logger) -> None:
        """Make the folder."""
        folder = Path(format_name_with_dist(self.folder_format, state.run_name))
        metrics = folder / METRICS
        if metrics.exists() and not (self.overwrite or self.is_resuming):
            raise FileExistsError(
                f"folder={self.folder_format!r} is {str(folder)!r} in this run, and holds an earlier one. Give "
                f"RunRecorder(overwrite=True), or the Trainer another run_name."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._state, self._folder = state, folder
        self._metrics = KeptFile(metrics, -1, is_continued=self.is_resuming)
        if self.is_resuming:
            self._num_lines = _ALL_LINES  # unless the checkpoint says how many
            status = read_json(folder / STATUS)
            self._started = status.get("started", self._started)
            self._saved_earlier = [
                path for path in status.get("checkpoints", []) if "://" in path or os.path.exists(path)
            ]
        self._config |= {"run_name": state.run_name, "environment": environment(state)}
        self._write_facts("running")

    def after_load(self, state: State, logger: Logger) -> None:
        """Take back what a resumed run does again."""
        if not self.is_resuming or self._metrics is None:
            return
        if int(state.timestamp.batch) == 0:  # there was no checkpoint to go on with
            self._num_lines = 0
        self._metrics.close()
        try:
            self._num_lines = keep_lines(self._metrics.path, self._num_lines)
        except OSError as error:  # a full disk ends no training
            _log.warning("%s keeps what is done again: %s", self._metrics.path, error)
        self._metrics = KeptFile(self._metrics.path, -1, is_continued=True)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Bring the files up to date."""
        self._has_ended_fit = False
        self._flush("running")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write what has become known, and at the interval bring the files up to date."""
        self._write_pending(waits=False)
        if int(state.timestamp.batch) % self.flush_interval == 0:
            self._flush("running")

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Bring the files up to date."""
        self._flush("running")

    def fit_end(self, state: State, logger: Logger) -> None:
        """Bring the files up to date."""
        self._has_ended_fit = True
        self._write_pending(waits=True)

    def close(self, state: State, logger: Logger) -> None:
        """Write what is left, how the run has ended, and the page."""
        if self._metrics is None:
            return
        error = sys.exc_info()[1]
        status = "failed" if error is not None else "finished" if self._has_ended_fit else "stopped early"
        self._write_pending(waits=True)
        self._flush(status, error)
        self._metrics.close()
        self._metrics = None
        if self.page:
            self._write_page()

    def _write_pending(self, *, waits: bool) -> None:
        """Write what is known, in order, or wait until it is."""
        while self._metrics is not None and self._pending and (waits or self._pending[0][1].is_ready()):
            when, snapshot = self._pending.popleft()
            values = {name: _plain(value) for name, value in snapshot.read().items()}
            line = {**when, "metrics": {name: value for name, value in values.items() if value is not None}}
            if line["metrics"]:
                self._metrics.write(json.dumps(line).encode() + b"\n")
                self._num_lines += 1

    def _flush(self, status: str, error: BaseException | None = None) -> None:
        if self._metrics is None:
            return
        self._write_pending(waits=False)
        self._metrics.sync()
        self._write_facts(status, error)

    def _write_facts(self, status: str, error: BaseException | None = None) -> None:
        assert self._state is not None
        state, now = self._state, datetime.datetime.now(datetime.UTC)
        paths = dict.fromkeys([*self._saved_earlier, *saved_checkpoints(state)])
        self._write(CONFIG, self._config)
        self._write(ACTING, self._acting.as_dict())
        self._write(TIMES, {"step": self._time.seconds, "profiler": profiler_times(state)})
        self._write(
            STATUS,
            {
                "status": status,
                "error": None if error is None else "".join(traceback.format_exception(error)),
                "started": self._started,
                "updated": now.isoformat(),
                "epoch": int(state.timestamp.epoch),
                "batch": int(state.timestamp.batch),
                "sample": int(state.timestamp.sample),
                "token": int(state.timestamp.token),
                "folder": os.path.abspath(self.folder),
                "checkpoints": list(paths),
            },
        )

    def _write(self, name: str, value: Any) -> None:
        unfinished = self.folder / f".{name}.unfinished"
        try:
            unfinished.write_text(json.dumps(value, indent=1, default=str))
            unfinished.replace(self.folder / name)
        except OSError as error:  # a full disk ends no training
            _log.warning("%s could not be written: %s", self.folder / name, error)

    def _write_page(self) -> None:
        try:
            from composer.report.page import write_page
        except ImportError:
            _log.info("composer report %s shows this run; it needs: pip install 'composer-suite[report]'", self.folder)
            return
        try:
            write_page([self.folder], self.folder / "report.html")
        except OSError as error:
            _log.warning("The page about %s could not be written: %s", self.folder, error)


def _plain(value: Any) -> float | str | None:
    """Return a number as JSON can have it, `None` for what is no number."""
    number = as_number(value)
    return number if number is None or math.isfinite(number) else str(number)
