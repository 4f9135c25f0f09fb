"""Where the Trainer's log goes: the loggers given, a progress bar, the console."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.file_logger import FileLogger
from composer.loggers.mosaicml_logger import (
    MOSAICML_ACCESS_TOKEN_ENV_VAR,
    MOSAICML_PLATFORM_ENV_VAR,
    MosaicMLLogger,
)
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.report.environment import recorder_of_environment
from composer.report.recorder import RunRecorder
from composer.trainer._arguments import how_to_make
from composer.trainer._caller import level_of_user
from composer.trainer._first_failure import first_failure_of_others
from composer_events.batches import ensure_tuple
from composer_events.logger_destination import LoggerDestination

if TYPE_CHECKING:
    from composer.trainer._given import Given
    from composer_events.state import State

__all__ = ["choose_destinations", "record_failure"]


def choose_destinations(given: Given) -> list[LoggerDestination]:
    """Return the destinations of the log: those given, then the recorder, the progress bar and the console if wanted.

    Raises:
        TypeError: If one of them is no LoggerDestination.
        ValueError: If there is no such stream or interval.
    """
    destinations = list(ensure_tuple(given.loggers))
    if not any(isinstance(destination, RunRecorder) for destination in destinations):
        destinations += recorder_of_environment()
    for destination in destinations:
        if not isinstance(destination, LoggerDestination):
            hint = how_to_make(destination, LoggerDestination)
            raise TypeError(f"loggers holds {destination!r}, which is no LoggerDestination. {hint}")
        if isinstance(destination, FileLogger | RunRecorder):
            destination.is_resuming = given.autoresume
    if given.progress_bar and not _is_given("progress_bar", ProgressBarLogger, destinations):
        destinations.append(ProgressBarLogger(given.console_stream, given.log_traces))
    # Made even where it is not wanted, so that a wrong interval is an error wherever the script runs.
    console = ConsoleLogger(given.console_log_interval, given.console_stream, given.log_traces)
    if _wants_console(given) and not _is_given("log_to_console", ConsoleLogger, destinations):
        if given.progress_bar:
            warnings.warn(
                "progress_bar=True and log_to_console=True both write to the console, each into the other's lines. "
                "Give progress_bar=False.",
                stacklevel=level_of_user(),
            )
        destinations.append(console)
    is_given = any(isinstance(destination, MosaicMLLogger) for destination in destinations)
    on_platform = os.environ.get(MOSAICML_PLATFORM_ENV_VAR, "").lower() == "true"
    if on_platform and os.environ.get(MOSAICML_ACCESS_TOKEN_ENV_VAR) and not is_given:
        destinations.append(MosaicMLLogger())
    return destinations


def record_failure(error: BaseException, state: State) -> None:
    """Tell the recorders of a run what has ended it, and its profiler when: who catches it may close much later."""
    end_open_spans = getattr(state.profiler, "end_open_spans", None)  # the engine asks less of a profiler than ours has
    if end_open_spans is not None:
        end_open_spans()
    of_others = first_failure_of_others(error)
    for destination in state.callbacks:
        if isinstance(destination, RunRecorder):
            destination.note_failure(error, of_others)
        elif isinstance(destination, MosaicMLLogger):
            destination.log_exception(error)
    if of_others is not None and isinstance(error, Exception) and str(error) not in of_others:
        error.add_note(of_others.rstrip())  # that another rank is gone is not to be the last thing read


def _wants_console(given: Given) -> bool:
    # None was what older releases had by default: the console where there is no progress bar.
    return not given.progress_bar if given.log_to_console is None else given.log_to_console


def _is_given(argument: str, kind: type, destinations: list[Any]) -> bool:
    if not any(isinstance(destination, kind) for destination in destinations):
        return False
    warnings.warn(
        f"loggers already holds a {kind.__name__}; {argument}=True adds no second.", stacklevel=level_of_user()
    )
    return True
