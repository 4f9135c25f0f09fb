"""Recorder of a run: a folder with its configuration, metrics, activity of algorithms and outcome."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import time
import traceback
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from composer.loggers._run_lines import stop_reasons
from composer.loggers._service_queue import fatal_error, id_of_uncaught, warn_logging_problem
from composer.report._run_files import (
    Acting,
    FactFiles,
    MetricLines,
    OwnAttempt,
    StepTime,
    profiler_times,
    saved_checkpoints,
    saved_traces,
)
from composer.report._settings import environment, fit_settings, script_facts, typed_settings
from composer.report.runs import ACTING, CONFIG, METRICS, STATUS, TIMES, now_at, read_json
from composer_checkpoint.lock import FolderInUseError, FolderLock
from composer_dist import get_global_rank
from composer_dist.attempts import FILE as ATTEMPTS
from composer_dist.progress import progress_recorder
from composer_events.arguments import check_counts, check_flags
from composer_events.event import Event
from composer_events.formatting import check_placeholders, format_name_with_dist
from composer_events.logger_destination import LoggerDestination

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Time

__all__ = ["RunRecorder", "VARIABLE", "recorder_of_environment"]

_log = getLogger(__name__)
_TRACES: Final = "algorithm_traces/"
_ALL_LINES: Final = 2**62  # not infinity: `islice` takes at most `sys.maxsize`
_ENDED: Final = ("finished", "stopped early", "failed")
_REST_S: Final = 1.0  # at least, between two flushes; with short epochs they would dominate
_LONGEST_REST_S: Final = 10.0  # at most; a killed run loses this much
# Lines are converted in groups: a single one, between two batches, takes several times as long.
_MOST_PENDING: Final = 256
# Events with a method below. The others are only timed, without the cost of a method call.
_HEARD: Final = frozenset(
    {Event.INIT, Event.AFTER_LOAD, Event.FIT_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END}
    | {Event.EVAL_STANDALONE_END, Event.PREDICT_END}
)
# At these events, the timestamp already counts their batch.
_AFTER_BATCH: Final = frozenset(
    event.value for event in Event if event.is_eval or event.is_predict or event.value.endswith(("_end", "_checkpoint"))
)


class RunRecorder(LoggerDestination):
    """Logger that records a run in a folder, for `composer report` and other programs.

    | File | Content |
    |---|---|
    | `config.json` | settings, hyperparameters and the environment |
    | `metrics.jsonl` | one line per time in training, with the values logged at it |
    | `acting.json` | which algorithm acted on which event, in which batches |
    | `times.json` | durations of the parts of a step, and the table of a profiler's `EventRecorder` |
    | `status.json` | running, finished, stopped early or failed, and why; checkpoints and traces |
    | `attempts.json` | how the time of each attempt at the run was spent; written by the launcher if there is one |
    | `report.html` | the page, at the end |

    Only rank 0 writes. Values that a device is still computing are written once they are available, without
    synchronization. When a run ends, even by an exception, everything is written. A killed run loses the lines since
    the last flush.

    Args:
        folder: The folder, with the placeholders of `format_name_with_dist`.
        flush_interval: The number of batches between flushes; the end of an epoch also flushes. Flushes are at least
            1 s and at most 10 s apart, or one batch if it takes longer.
        overwrite: Whether the folder of an earlier run may be replaced. A resumed run (`Trainer(autoresume=True)`)
            continues its folder, and replaces the lines written after the checkpoint.
        page: Whether to write the page at the end.
        is_optional: Whether to train without a record, after one warning, if the folder cannot be written, and to
            append a number to its name (`plum-2`) if it holds an earlier run. Recorders from `COMPOSER_RUNS` are
            optional.

    Attributes:
        is_resuming: Whether to continue an existing folder. The Trainer sets it.

    Raises:
        FileExistsError: At the start of training, if the folder holds a run, or another process writes to it.
        OSError: At the start of training, if the folder cannot be written.
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
        is_optional: bool = False,
    ) -> None:
        check_placeholders(folder=folder)
        check_counts(flush_interval=flush_interval)
        check_flags(overwrite=overwrite)
        self.folder_format = os.fspath(folder)
        self.flush_interval = flush_interval
        self.overwrite = overwrite
        self.page = page
        self.is_optional = is_optional
        self.is_resuming = False
        self._state: State | None = None
        self._folder: Path | None = None
        self._lock: FolderLock | None = None
        self._lines: MetricLines | None = None
        self._facts: FactFiles | None = None
        self._config: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._acting = Acting()
        self._time = StepTime()
        self._attempt = OwnAttempt()
        self._started = datetime.datetime.now(datetime.UTC).isoformat()
        self._saved_earlier: list[str] = []
        self._earlier: dict[str, Any] = {}  # status file of the resumed run
        self._num_lines_saved = 0
        self._num_batches_before = 0  # the batches before this process started
        self._flushed_at_s = 0.0
        self._is_writer = False
        self._is_fitting = False
        self._planned: Time[Any] | None = None  # the end of the current `fit`
        self._known_reasons = frozenset[tuple[str, str]]()  # of callbacks, at the start of the current `fit`
        self._has_fitted = False
        self._reason: str | None = None
        self._failure: str | None = None
        self._cause: str | None = None
        self._has_fit_failed = False
        self._has_worked = False  # whether a training, an evaluation or a prediction has finished
        self._id_of_uncaught = id_of_uncaught()
        self._ending = "finished"

    @property
    def has_folder(self) -> bool:
        """Return whether there is a folder, which can be written to."""
        return self._folder is not None

    @property
    def folder(self) -> Path:
        """The folder of the files.

        Raises:
            RuntimeError: Before `Event.INIT`, since the name of the run is not known.
        """
        if self._folder is None:
            raise RuntimeError(
                f"The folder {self.folder_format!r} has no name before Event.INIT, when the run gets its own."
            )
        return self._folder

    def state_dict(self) -> dict[str, Any]:
        """Return the extent of the files, for a run that resumes from this checkpoint."""
        if self._lines is None:  # the folder could not be written
            return {}
        self._lines.sync()
        return {
            "num_lines": self._lines.num_lines,
            "acting": copy.deepcopy(self._acting.as_dict()),
            "step_s": dict(self._time.seconds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the extent in a resumed run. A new run that only loads the weights ignores it."""
        if not self.is_resuming or not state:
            return
        self._num_lines_saved = state["num_lines"]
        self._acting.restore(state["acting"])
        self._time.seconds |= state["step_s"]

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Time the event, and handle it on rank 0."""
        if event is Event.INIT:
            self._is_writer = get_global_rank() == 0
        if not self._is_writer:
            return
        self._time.see(event)
        if event in _HEARD:
            super().run_event(event, state, logger)

    def note_failure(self, error: BaseException, cause: str | None = None) -> None:
        """Record the failure of training or of an evaluation at once, since the process may not reach `close`.

        The next `fit` clears it. A later successful evaluation also clears the failure of an evaluation. `cause` is one
        outside this process, such as the traceback of another rank.
        """
        self._cause = cause
        self._note(error)

    def _note(self, error: BaseException) -> None:
        self._has_fit_failed |= self._is_fitting
        self._failure = "".join(traceback.format_exception(error))
        if self._cause is not None:
            self._failure += f"\n{self._cause}"
        try:
            self._flush("failed")
        except Exception as trouble:  # a failed device also prevents reading its values
            _log.warning("The record in %s could not be brought up to date after a failure: %s", self._folder, trouble)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep hyperparameters."""
        self._config.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep metrics with their time in training."""
        if self._time.is_stepping:  # the Trainer logs the losses directly after the optimizer's step
            self._time.end_step()
        if self._state is not None and self._lines is not None:
            self._lines.add(self._state.timestamp, step, metrics)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Keep the activity of algorithms."""
        if self._state is None:
            return
        for name in map(str, traces):
            if name.startswith(_TRACES):
                algorithm, _, event = name.removeprefix(_TRACES).rpartition("/")
                event = event.rpartition(".")[2].lower()
                num_batches = self._state.timestamp.num_batches
                # Not below 0: evaluation events also occur before the first batch.
                batch = max(0, num_batches - 1) if event in _AFTER_BATCH else num_batches
                self._acting.add(f"{algorithm} on {event}", batch)

    def init(self, state: State, logger: Logger) -> None:
        """Create the folder, and start the record."""
        self._num_batches_before = state.timestamp.num_batches
        try:
            self._begin(state)
        except OSError as error:
            self._release()
            if not self.is_optional:
                raise
            warn_logging_problem(
                f"folder={self.folder_format!r} cannot be written, so this run leaves no record, and training "
                f"continues: {error}. Give a folder that can be."
            )

    def after_load(self, state: State, logger: Logger) -> None:
        """Drop the lines that a resumed run repeats."""
        self._num_batches_before = state.timestamp.num_batches
        if self.is_resuming and self._lines is not None:
            # At batch 0 no checkpoint was loaded, so the run starts over. A finished run repeats nothing.
            is_finished = state.max_duration is not None and state.timestamp >= state.max_duration
            num_lines = _ALL_LINES if is_finished else self._num_lines_saved
            self._lines.keep(num_lines if state.timestamp.num_batches else 0)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reset the outcome, and flush the files."""
        self._is_fitting, self._has_fit_failed = True, False
        # If the duration has already elapsed, `fit` trains nothing and must not change the recorded outcome.
        has_time = state.max_duration is None or state.timestamp < state.max_duration
        self._has_fitted = has_time
        self._planned, self._known_reasons = (state.max_duration if has_time else None), frozenset(stop_reasons(state))
        self._reason = self._failure = self._cause = None
        self._settings |= fit_settings(state)
        self._attempt.start(state.timestamp.num_batches, self._time.seconds)
        self._flush("running")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Flush the files at the interval, and bound the memory of pending lines."""
        if self._lines is not None and len(self._lines.pending) >= _MOST_PENDING:
            self._lines.write(waits=False)  # a batch must not wait for the device
        rested_s = time.monotonic() - self._flushed_at_s
        if rested_s >= _LONGEST_REST_S or (
            rested_s >= _REST_S and state.timestamp.num_batches % self.flush_interval == 0
        ):
            self._flush("running")

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Flush the files."""
        if time.monotonic() - self._flushed_at_s >= _REST_S:
            self._flush("running")

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the metrics, and record why training has ended early, if it has."""
        self._is_fitting, self._has_worked = False, True
        if self._planned is not None and state.timestamp < self._planned:
            told = [": ".join(reason) for reason in stop_reasons(state) if reason not in self._known_reasons]
            ended = "" if state.max_duration is None else f" at {state.max_duration.to_timestring()}"
            planned = self._planned.to_timestring()
            self._reason = "; ".join(told) or f"training has ended{ended}, and was to be {planned} long"
        if self._lines is not None:
            self._lines.write(waits=True)

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Clear the failure of an earlier evaluation or prediction."""
        self._has_worked = True
        if not self._has_fit_failed:
            self._failure = None

    predict_end = eval_standalone_end

    def close(self, state: State, logger: Logger) -> None:
        """Write the remaining lines and the outcome of the run; the files stay open for `post_close`."""
        if self._lines is None:
            return
        is_undone = self._is_fitting or not self._has_worked
        error = fatal_error(was_busy=is_undone, id_of_earlier=self._id_of_uncaught)
        try:
            if error is not None:
                self._note(error)
            self._ending = self._find_ending(state)
            self._flush(self._ending)
        except BaseException:  # `post_close` is not called after an error
            self._release()
            raise

    def _find_ending(self, state: State) -> str:
        if self._failure is not None:
            return "failed"
        if self._is_fitting or self._reason is not None:
            return "stopped early"
        # A custom loop may train without the events FIT_START and FIT_END.
        has_trained = self._has_fitted or state.timestamp.num_batches != self._num_batches_before
        if self._earlier and not has_trained:  # resuming without training must not change the outcome
            status = self._earlier.get("status")
            if status in _ENDED:
                self._reason, self._failure = self._earlier.get("reason"), self._earlier.get("error")
                return status
            self._reason = "it was closed before it had gone on with its training"
        elif not (has_trained or self._has_worked):
            self._reason = "it was closed before it had trained, evaluated or predicted anything"
        return "finished" if self._reason is None else "stopped early"

    def post_close(self) -> None:
        """Write values that other callbacks logged while closing, and the page."""
        if self._lines is None:
            return
        try:
            self._lines.close()
            self._write_facts(self._ending)
            self._lines = None
            if self.page:
                self._write_page()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _begin(self, state: State) -> None:
        folder = self._make_folder(state.run_name)
        try:  # before opening files: a second run of the same name must not truncate those of the first
            self._lock = FolderLock(folder).acquire()
        except FolderInUseError as error:
            raise FileExistsError(f"{str(folder)!r} belongs to a run that has not ended: {error}") from error
        self._lines = MetricLines(folder / METRICS, is_continued=self.is_resuming)
        self._state, self._folder, self._facts = state, folder, FactFiles(folder)
        if not self.is_resuming:
            (folder / ATTEMPTS).unlink(missing_ok=True)
        if (recorder := progress_recorder()) is not None:
            recorder.note_folder(folder)
        if self.is_resuming:
            self._num_lines_saved = _ALL_LINES  # until a checkpoint provides the number
            status = read_json(folder / STATUS)
            self._started = status.get("started", self._started)
            self._earlier, self._has_worked = status, status.get("status") == "finished"
            saved = [now_at(path, status.get("folder"), folder) for path in status.get("checkpoints", [])]
            self._saved_earlier = [path for path in saved if "://" in path or os.path.exists(path)]
        self._config |= {"run_name": state.run_name, "environment": environment(state)}
        self._settings = typed_settings(state) | script_facts()
        self._write_facts("running")

    def _make_folder(self, run_name: str) -> Path:
        """Create the folder, and return its absolute path, which stays valid after a change of directory."""
        folder = wanted = Path(format_name_with_dist(self.folder_format, run_name)).absolute()
        for number in itertools.count(2):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                # Atomic, so that only one of two starting runs gets it.
                (folder / METRICS).touch(exist_ok=self.overwrite or self.is_resuming)
                break
            except FileExistsError:
                if not self.is_optional:
                    raise FileExistsError(
                        f"folder={self.folder_format!r} is {str(folder)!r} in this run, and holds an earlier one. Give "
                        f"RunRecorder(overwrite=True), or the Trainer another run_name."
                    ) from None
                folder = wanted.with_name(f"{wanted.name}-{number}")
        return folder

    def _flush(self, status: str) -> None:
        if self._lines is not None:
            self._lines.flush()
            self._write_facts(status)
            self._flushed_at_s = time.monotonic()

    def _write_facts(self, status: str) -> None:
        assert self._state is not None
        assert self._facts is not None
        write = self._facts.write
        state, now = self._state, datetime.datetime.now(datetime.UTC)
        paths = dict.fromkeys([*self._saved_earlier, *saved_checkpoints(state)])
        write(CONFIG, self._settings | self._config)  # values logged by the script take precedence
        write(ACTING, self._acting.as_dict())
        self._attempt.write(self.folder, state.timestamp.num_batches, self._time.seconds, status)
        write(TIMES, {"step": self._time.seconds, "profiler": profiler_times(state)})
        write(
            STATUS,
            {
                "status": status,
                "reason": self._reason,
                "error": self._failure,
                "started": self._started,
                "updated": now.isoformat(),
                "epoch": state.timestamp.num_epochs,
                "batch": state.timestamp.num_batches,
                "sample": state.timestamp.num_samples,
                "token": state.timestamp.num_tokens,
                "folder": str(self.folder),
                "checkpoints": list(paths),
                "traces": saved_traces(state),
            },
        )

    def _write_page(self) -> None:
        from composer.report.runs import write_page

        try:
            write_page([self.folder], self.folder / "report.html")
        except OSError as error:  # the run is over, and its record is complete without the page
            _log.warning("The page about %s could not be written: %s", self.folder, error)


VARIABLE = "COMPOSER_RUNS"
"""Environment variable with the parent folder of recorded runs. If unset or empty, no run is recorded."""


def recorder_of_environment() -> list[RunRecorder]:
    """Return the recorder for `COMPOSER_RUNS`, if it is set. It is optional, and writes no page."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return []
    # The variable holds a path, not a template, so braces in it are literal.
    literally = folder.replace("{", "{{").replace("}", "}}")
    return [RunRecorder(os.path.join(literally, "{run_name}"), page=False, is_optional=True)]
