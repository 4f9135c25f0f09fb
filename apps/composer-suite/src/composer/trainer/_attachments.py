"""Loggers, profiler and log level of a Trainer, as chosen by its arguments."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.file_logger import FileLogger
from composer.loggers.mosaicml_logger import MOSAICML_ACCESS_TOKEN_ENV_VAR, MOSAICML_PLATFORM_ENV_VAR, MosaicMLLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.report.recorder import RunRecorder, recorder_of_environment
from composer.trainer._arguments import how_to_create, user_stacklevel
from composer.trainer._rank_sync import first_failure_of_others
from composer_dist import get_global_rank
from composer_events.batches import ensure_tuple
from composer_events.hparams import extract_hparams
from composer_events.logger_destination import LoggerDestination

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler
    from composer.trainer._arguments import TrainerArguments
    from composer.trainer._build import ResolvedArguments
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events.logger import Logger
    from composer_events.state import State


def choose_destinations(given: TrainerArguments) -> list[LoggerDestination]:
    """Return the given loggers, followed by the recorder, the progress bar and the console, if enabled."""
    destinations = list(ensure_tuple(given.loggers))
    if not any(isinstance(destination, RunRecorder) for destination in destinations):
        destinations += recorder_of_environment()
    for destination in destinations:
        if not isinstance(destination, LoggerDestination):
            hint = how_to_create(destination, LoggerDestination)
            raise TypeError(f"loggers holds {destination!r}, which is no LoggerDestination. {hint}")
        if isinstance(destination, FileLogger | RunRecorder):
            # A resumed run continues its files; any other run must not append to those of an earlier one.
            destination.is_resuming = given.autoresume
    if given.progress_bar and not _is_given("progress_bar", ProgressBarLogger, destinations):
        destinations.append(ProgressBarLogger(given.console_stream, given.log_traces))
    _add_console(given, destinations)
    is_given = any(isinstance(destination, MosaicMLLogger) for destination in destinations)
    on_platform = os.environ.get(MOSAICML_PLATFORM_ENV_VAR, "").lower() == "true"
    if on_platform and os.environ.get(MOSAICML_ACCESS_TOKEN_ENV_VAR) and not is_given:
        destinations.append(MosaicMLLogger())
    return destinations


def _add_console(given: TrainerArguments, destinations: list[LoggerDestination]) -> None:
    # None was the default of earlier releases: log to the console unless there is a progress bar.
    is_wanted = not given.progress_bar if given.log_to_console is None else given.log_to_console
    if not is_wanted and given.is_default("console_log_interval") and given.is_default("console_stream"):
        return
    # Created even if it is not used, so that a wrong interval is an error in every run.
    console = ConsoleLogger(given.console_log_interval, given.console_stream, given.log_traces)
    if not is_wanted or _is_given("log_to_console", ConsoleLogger, destinations):
        return
    if given.progress_bar:
        warnings.warn(
            "progress_bar=True and log_to_console=True both write to the console, each into the other's lines. "
            "Give progress_bar=False.",
            stacklevel=user_stacklevel(),
        )
    destinations.append(console)


def record_failure(error: BaseException, state: State) -> None:
    """Pass an exception to the recorders and end the profiler's spans now, since the user may close much later."""
    end_open_spans = getattr(state.profiler, "end_open_spans", None)  # custom profilers need not have it
    if end_open_spans is not None:
        end_open_spans()
    of_others = first_failure_of_others(error)
    for destination in state.callbacks:
        if isinstance(destination, RunRecorder):
            destination.note_failure(error, of_others)
        elif isinstance(destination, MosaicMLLogger):
            destination.log_exception(error)
    # An error that all ranks raise alike would only be repeated.
    if of_others is not None and isinstance(error, Exception) and str(error) not in of_others:
        error.add_note(of_others.rstrip())  # the cause is on another rank, with the more useful traceback


def _is_given(argument: str, kind: type, destinations: list[Any]) -> bool:
    if not any(isinstance(destination, kind) for destination in destinations):
        return False
    warnings.warn(
        f"loggers already holds a {kind.__name__}; {argument}=True adds no second.", stacklevel=user_stacklevel()
    )
    return True


# Arguments that Composer's constructor does not have. They are logged only if used, so that the hyperparameters of
# runs stay comparable.
_ONLY_IF_USED = frozenset(
    {
        "load_trusted",
        "load_restart_epoch",
        "save_keep",
        "save_async",
        "save_async_policy",
        "on_divergence",
        "activation_checkpointing",
        "ddp_comm_hook",
        "deepspeed_config",
        "grad_accum",
        "save_artifact_name",
        "save_latest_artifact_name",
        "compute_training_metrics",
        "fsdp_config",
        "fsdp_auto_wrap",
        "load_fsdp_monolith_rank0_only",
    }
)


def log_arguments(given: TrainerArguments, parts: ResolvedArguments, state: State, logger: Logger) -> dict[str, Any]:
    """Log the resolved arguments as hyperparameters, and return them."""
    arguments = {name: value for name, value in given.items() if not (name in _ONLY_IF_USED and given.is_default(name))}
    hparams = extract_hparams(
        arguments
        | {
            "model": parts.model,
            "algorithms": parts.algorithms,
            "callbacks": [callback for callback in parts.callbacks if callback is not parts.saver],
            "loggers": parts.destinations,
            "optimizers": parts.optimizers[0] if len(parts.optimizers) == 1 else parts.optimizers,
            "device": state.device,
            "precision": state.precision,
            "run_name": state.run_name,
            "seed": state.rank_zero_seed + get_global_rank(),
            "num_optimizers": len(parts.optimizers),
            "rank_zero_seed": state.rank_zero_seed,
            "is_model_compiled": parts.compilation.is_compiled,
            "auto_microbatching": state.auto_microbatching,
            # Local variables of Composer's constructor, which it logs too.
            "latest_remote_file_name": None,
            "remote_ud_has_format_string": [False] * len(parts.destinations),
        }
    )
    logger.log_hyperparameters(hparams)
    return hparams


def check_profiler(profiler: Any, destinations: list[LoggerDestination]) -> None:
    """Check the profiler, warn of its cost, and add the uploaders that its files need."""
    if profiler is None:
        return
    from composer.profiler.profiler import Profiler  # a slow import that only profiled runs need
    from composer_checkpoint.remote.logger import maybe_create_remote_uploader_downloader_from_uri

    if not isinstance(profiler, Profiler):
        hint = " Call it: Profiler(schedule, trace_handlers)." if isinstance(profiler, type) else ""
        raise TypeError(f"profiler={profiler!r} is not a composer.profiler.Profiler.{hint}")
    warnings.warn(
        "The profiler is enabled. Using the profiler adds additional overhead when training.",
        stacklevel=user_stacklevel(),
    )
    for name in profiler.remote_filenames:
        sender = maybe_create_remote_uploader_downloader_from_uri(name, destinations)
        if sender is not None:
            destinations.append(sender)


def bind_profiler(profiler: Profiler | None, state: State, saver: CheckpointSaver | None) -> None:
    """Attach a profiler to the state."""
    if profiler is None:
        return
    state.profiler = profiler
    profiler.bind_to_state(state)
    if saver is not None:
        # The saver comes after the callbacks of the profiler, so that checkpoints include their state of the same
        # event.
        state.callbacks.remove(saver)
        state.callbacks.append(saver)


def check_log_level(level: Any) -> None:
    """Check a logging level."""
    known = logging.getLevelNamesMapping()
    if level is not None and (not isinstance(level, str) or level.upper() not in known):
        raise ValueError(f"python_log_level={level!r} must be None or one of {', '.join(map(str.lower, known))}.")


def set_log_level(level: str | None) -> None:
    """Set the level of Composer's loggers, and log with time, rank, process and thread.

    Without a level, nothing is configured. The levels of other loggers are not changed.
    """
    if level is None:
        return
    who = f"rank{get_global_rank()}[%(process)d][%(threadName)s]"
    logging.basicConfig(format=f"%(asctime)s: {who}: %(levelname)s: %(name)s: %(message)s")
    logging.getLogger("composer").setLevel(level.upper())
