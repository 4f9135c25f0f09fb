"""The folder that a run leaves: configuration, metrics, what acted when, how it ended."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import sys
import time
import traceback
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from composer.loggers._service_queue import warn_of_trouble
from composer.report._activity import Acting, StepTime
from composer.report._run_facts import (
    environment,
    fit_settings,
    profiler_times,
    saved_checkpoints,
    saved_traces,
    typed_settings,
)
from composer.report._run_files import FactFiles, MetricLines
from composer.report.runs import ACTING, CONFIG, METRICS, STATUS, TIMES, now_at, read_json
from composer_checkpoint.lock import FolderInUseError, FolderLock
from composer_dist import get_global_rank
from composer_events.arguments import check_counts, check_flags, check_places
from composer_events.event import Event
from composer_events.formatting import check_placeholders, format_name_with_dist
from composer_events.logger_destination import LoggerDestination

if TYPE_CHECKING:
    from collections.abc import Iterator

    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["RunRecorder", "VARIABLE", "recorder_of_environment"]

_log = getLogger(__name__)
_TRACES: Final = "algorithm_traces/"
_ALL_LINES: Final = 2**62
_ENDED: Final = ("finished", "stopped early", "failed")
_REST_S: Final = 1.0  # between two flushes: short epochs would spend their time on them
_LONGEST_REST_S: Final = 10.0  # so much of a killed run is lost, and whoever looks on sees it so late
# Lines are made many at a time: one alone, between two batches, takes several times as long.
_MOST_PENDING: Final = 256
# What it acts on; of others the time is noted.
_HEARD: Final = frozenset(
    {Event.INIT, Event.AFTER_LOAD, Event.FIT_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END}
    | {Event.EVAL_STANDALONE_END, Event.PREDICT_END}
)
# When these happen, the timestamp counts the batch that they belong to.
_AFTER_BATCH: Final = frozenset(
    event.value for event in Event if event.is_eval or event.is_predict or event.value.endswith(("_end", "_checkpoint"))
)


class RunRecorder(LoggerDestination):
    """Leaves a folder that says all about a run, for `composer report` and for other programs.

    | File | What it holds |
    |---|---|
    | `config.json` | the settings and hyperparameters, and what the run ran on |
    | `metrics.jsonl` | a line for what was logged at one time in training: that time and the values |
    | `acting.json` | which algorithm acted on which event, in which batches |
    | `times.json` | how long the parts of a step took, and the table of a profiler's `EventRecorder` |
    | `status.json` | whether it is running, finished, stopped early or failed, and why; its checkpoints and traces |
    | `report.html` | the page, at the end |

    Rank 0 writes. Values that a device is still computing are written when they are there, and nobody waits for them;
    all is written when a run ends, also by an exception. A run that is killed loses what it had not flushed.

    Args:
        folder: Where to, with the placeholders of `format_name_with_dist`.
        flush_interval: After how many batches the files are brought up to date; also at the end of each epoch. Once a
            second at most, and every ten seconds at least, where batches are no longer than that.
        overwrite: Whether a folder of an earlier run may be replaced. A run that is resumed
            (`Trainer(autoresume=True)`) goes on with its folder; what was after the checkpoint is done again.
        page: Whether to write the page at the end, which needs plotly (`pip install 'composer-suite[report]'`);
            without it, the log says so.
        is_optional: Whether training goes on without a folder where none can be written, with one warning, and goes
            beside that of an earlier run (`plum-2`) instead of refusing to begin. So are recorders that
            `COMPOSER_RUNS` asks for.

    Attributes:
        is_resuming: Whether a folder that is there is continued. The Trainer sets it.

    Raises:
        FileExistsError: If there is such a folder, when training begins, or a run that goes on writes to it.
        OSError: If it cannot be written, likewise.
        TypeError: If an argument is of another kind.
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
        check_places(folder=folder)
        check_placeholders(folder=folder)
        check_counts(flush_interval=flush_interval)
        check_flags(overwrite=overwrite, page=page, is_optional=is_optional)
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
        self._started = datetime.datetime.now(datetime.UTC).isoformat()
        self._saved_earlier: list[str] = []
        self._earlier: dict[str, Any] = {}  # what the record of a run that is resumed says of how it has ended
        self._num_lines_saved = 0
        self._num_batches_before = 0  # this process began
        self._flushed_at_s = 0.0
        self._is_writer = False
        self._is_fitting = False
        self._plan: Plan | None = None
        self._reason: str | None = None
        self._failure: str | None = None
        self._cause: str | None = None
        self._has_fit_failed = False
        self._has_worked = False  # a training, an evaluation or a prediction, to its end
        self._id_of_uncaught = id_of_uncaught()
        self._ending = "finished"

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
        if self._lines is None:  # what an earlier run has left here is none of this one's business
            return {}
        self._lines.sync()
        return {
            "num_lines": self._lines.num_lines,
            "acting": copy.deepcopy(self._acting.as_dict()),
            "step_s": dict(self._time.seconds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there if this is a resumed run, and not another one that begins with a checkpoint's weights."""
        if not self.is_resuming or not state:
            return
        self._num_lines_saved = state["num_lines"]
        self._acting.restore(state["acting"])
        self._time.seconds |= state["step_s"]

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Look at the clock, and do what there is to do on the event."""
        if event is Event.INIT:
            self._is_writer = get_global_rank() == 0
        if not self._is_writer:
            return
        self._time.see(event)
        if event in _HEARD:
            super().run_event(event, state, logger)

    def note_failure(self, error: BaseException, cause: str | None = None) -> None:
        """Write down what has ended training or an evaluation: nobody knows whether there will be time to close.

        It is forgotten when training begins again, that of an evaluation also when a later one ends well.

        Args:
            error: The exception.
            cause: What has led to it elsewhere, such as the traceback of another rank.
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
        except Exception as trouble:  # what training has failed of may keep values from being read, too
            _log.warning("The record in %s could not be brought up to date after a failure: %s", self._folder, trouble)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep the settings of the run."""
        self._config.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep values, with the time that they belong to."""
        if self._state is not None and self._lines is not None:
            self._lines.add(self._state.timestamp, step, metrics)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Keep which algorithms acted."""
        if self._state is None:
            return
        for name in map(str, traces):
            if name.startswith(_TRACES):
                algorithm, _, event = name.removeprefix(_TRACES).rpartition("/")
                event = event.rpartition(".")[2].lower()
                num_batches = self._state.timestamp.num_batches
                batch = max(0, num_batches - 1) if event in _AFTER_BATCH else num_batches
                self._acting.add(f"{algorithm} on {event}", batch)

    def init(self, state: State, logger: Logger) -> None:
        """Make the folder."""
        self._num_batches_before = state.timestamp.num_batches
        try:
            self._begin(state)
        except OSError as error:
            self._release()
            if not self.is_optional:
                raise
            warn_of_trouble(
                f"folder={self.folder_format!r} cannot be written, so this run leaves no record, and training goes on: "
                f"{error}. Give a folder that can be."
            )

    def after_load(self, state: State, logger: Logger) -> None:
        """Take back what a resumed run does again."""
        self._num_batches_before = state.timestamp.num_batches
        if self.is_resuming and self._lines is not None:
            # Without a batch behind it there was no checkpoint to go on with.
            self._lines.keep(self._num_lines_saved if state.timestamp.num_batches else 0)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Bring the files up to date."""
        self._is_fitting, self._has_fit_failed = True, False
        # A run that was stopped before trains nothing, and ends as it has ended then.
        has_time = state.max_duration is None or state.timestamp < state.max_duration
        self._plan = Plan(state) if has_time else None
        self._reason = self._failure = self._cause = None
        self._settings |= fit_settings(state)
        self._flush("running")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Bring the files up to date at the interval, and let no more wait than memory has room for."""
        if self._lines is not None and self._lines.num_pending >= _MOST_PENDING:
            self._lines.write(waits=False)
        rested_s = time.monotonic() - self._flushed_at_s
        if rested_s >= _LONGEST_REST_S or (
            rested_s >= _REST_S and state.timestamp.num_batches % self.flush_interval == 0
        ):
            self._flush("running")

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Bring the files up to date."""
        if time.monotonic() - self._flushed_at_s >= _REST_S:
            self._flush("running")

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the metrics, and note why training has ended if it was before its time."""
        self._is_fitting, self._has_worked = False, True
        self._reason = None if self._plan is None else self._plan.reason_of_stop(state)
        if self._lines is not None:
            self._lines.write(waits=True)

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Forget an evaluation that failed before."""
        self._has_worked = True
        if not self._has_fit_failed:
            self._failure = None

    def predict_end(self, state: State, logger: Logger) -> None:
        """Forget a prediction that failed before."""
        self._has_worked = True
        if not self._has_fit_failed:
            self._failure = None

    def close(self, state: State, logger: Logger) -> None:
        """Write what is left, and how the run has ended."""
        if self._lines is None:
            return
        is_undone = self._is_fitting or not self._has_worked
        error = fatal_error(was_busy=is_undone, id_of_earlier=self._id_of_uncaught)
        try:
            if error is not None:
                self._note(error)
            self._ending = self._find_ending(state)
            self._flush(self._ending)
        except BaseException:  # `post_close` is not called then
            self._release()
            raise

    def _find_ending(self, state: State) -> str:
        """Return how the run has ended, and put the reason in its place."""
        if self._failure is not None:
            return "failed"
        if self._is_fitting or self._reason is not None:
            return "stopped early"
        # A loop of the user's own may train without the events that begin and end it.
        has_trained = self._plan is not None or state.timestamp.num_batches != self._num_batches_before
        if self._earlier and not has_trained:  # whoever only looks at a run does not change how it has ended
            status = self._earlier.get("status")
            if status in _ENDED:
                self._reason, self._failure = self._earlier.get("reason"), self._earlier.get("error")
                return status
            self._reason = "it was closed before it had gone on with its training"
        elif not (has_trained or self._has_worked):
            self._reason = "it was closed before it had trained, evaluated or predicted anything"
        return "finished" if self._reason is None else "stopped early"

    def post_close(self) -> None:
        """Write what the others have logged while they closed, and the page."""
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
        folder = make_folder(
            self.folder_format,
            state.run_name,
            may_hold_a_run=self.overwrite or self.is_resuming,
            goes_beside_others=self.is_optional,
        )
        self._lock = _locked(folder)
        self._lines = MetricLines(folder / METRICS, is_continued=self.is_resuming)
        self._state, self._folder, self._facts = state, folder, FactFiles(folder)
        if self.is_resuming:
            self._num_lines_saved = _ALL_LINES  # unless the checkpoint says how many
            status = read_json(folder / STATUS)
            self._started = status.get("started", self._started)
            self._earlier, self._has_worked = status, status.get("status") == "finished"
            saved = [now_at(path, status.get("folder"), folder) for path in status.get("checkpoints", [])]
            self._saved_earlier = [path for path in saved if "://" in path or os.path.exists(path)]
        self._config |= {"run_name": state.run_name, "environment": environment(state)}
        self._settings = typed_settings(state)
        self._write_facts("running")

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
        write(CONFIG, self._settings | self._config)  # what the script logs under such a name itself comes first
        write(ACTING, self._acting.as_dict())
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
        try:
            from composer.report.page import write_page
        except ImportError:
            _log.warning(
                "%s gets no page, which needs: pip install 'composer-suite[report]'. Then composer report writes it.",
                self.folder,
            )
            return
        try:
            write_page([self.folder], self.folder / "report.html")
        except OSError as error:
            _log.warning("The page about %s could not be written: %s", self.folder, error)


def _locked(folder: Path) -> FolderLock:
    """Return the lock of a folder, so that a second run of the same name takes no line away from the first."""
    try:
        return FolderLock(folder).acquire()
    except FolderInUseError as error:
        raise FileExistsError(f"{str(folder)!r} belongs to a run that is still going on: {error}") from error


def id_of_uncaught() -> int | None:
    """Return which exception nobody caught; the exception itself would keep alive what its frames hold."""
    return None if getattr(sys, "last_value", None) is None else id(sys.last_value)


def fatal_error(*, was_busy: bool, id_of_earlier: int | None) -> BaseException | None:
    """Return the exception that is on its way or, where work was left undone, has ended the process.

    Python forgets the latter as the exception on its way, and closes what is still open.

    Args:
        was_busy: Whether work was left undone.
        id_of_earlier: Of what nobody had caught before the run began, as in an earlier cell of a notebook.
    """
    error = sys.exc_info()[1]
    if error is None and was_busy and id_of_uncaught() not in (None, id_of_earlier):
        return sys.last_value
    return error


class Plan:
    """What is known when training begins of how it is to end.

    Args:
        state: The state then.
    """

    def __init__(self, state: State) -> None:
        self._duration = state.max_duration
        self._reasons = frozenset(_reasons(state))

    def reason_of_stop(self, state: State) -> str | None:
        """Return who has ended training before its time and why, `None` if it was as long as planned."""
        if self._duration is None or state.timestamp >= self._duration:
            return None
        told = [reason for reason in _reasons(state) if reason not in self._reasons]
        ended = "" if state.max_duration is None else f" at {state.max_duration.to_timestring()}"
        return "; ".join(told) or f"training has ended{ended}, and was to be {self._duration.to_timestring()} long"


def _reasons(state: State) -> Iterator[str]:
    """Yield what callbacks and algorithms say of why they have stopped training."""
    for each in (*state.callbacks, *state.algorithms):
        try:
            reason = getattr(each, "stop_reason", None)
        except Exception:  # whatever somebody else's property raises
            continue
        if isinstance(reason, str):
            yield f"{type(each).__name__}: {reason}"


def make_folder(template: str, run_name: str, *, may_hold_a_run: bool, goes_beside_others: bool) -> Path:
    """Make the folder of a run and return it, as a path that holds wherever the process goes.

    Args:
        template: Its name, with the placeholders of `format_name_with_dist`.
        run_name: The run's.
        may_hold_a_run: Whether there may be a run in it, to be replaced or continued.
        goes_beside_others: Whether, where there is one, a number is added to the name.

    Raises:
        FileExistsError: If there is a run in it and neither is wanted.
        OSError: If it cannot be made.
    """
    folder = wanted = Path(format_name_with_dist(template, run_name)).absolute()
    for number in itertools.count(2):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / METRICS).touch(exist_ok=may_hold_a_run)  # one of two runs that begin at once gets it
        except FileExistsError:
            if not goes_beside_others:
                raise FileExistsError(
                    f"folder={template!r} is {str(folder)!r} in this run, and holds an earlier one. Give "
                    f"RunRecorder(overwrite=True), or the Trainer another run_name."
                ) from None
            folder = wanted.with_name(f"{wanted.name}-{number}")
        else:
            return folder
    raise AssertionError("there is always a higher number")


VARIABLE = "COMPOSER_RUNS"
"""The folder that gets a folder for each run. Not set, or empty: none."""


def recorder_of_environment() -> list[RunRecorder]:
    """Return what the Trainer adds to the loggers: a recorder, or nothing.

    It is one that no training fails for, and that leaves the page to `composer report`.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return []
    literally = folder.replace("{", "{{").replace("}", "}}")
    return [RunRecorder(os.path.join(literally, "{run_name}"), page=False, is_optional=True)]
