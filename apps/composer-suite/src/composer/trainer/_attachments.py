"""Loggers, profiler and checkpoints of a Trainer, as chosen by its arguments."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

from composer.loggers._text_output import TextLogger
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.file_logger import FileLogger
from composer.loggers.mosaicml_logger import MOSAICML_ACCESS_TOKEN_ENV_VAR, MOSAICML_PLATFORM_ENV_VAR, MosaicMLLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.report.recorder import RunRecorder, recorder_of_environment
from composer.trainer._arguments import OLDER_NAMES_ONLY, check_members, user_stacklevel
from composer.trainer._error_context import first_failure_of_others
from composer.utils import checkpoint
from composer_checkpoint.ignore_keys import check_ignore_keys
from composer_dist import get_global_rank
from composer_events.hparams import extract_hparams
from composer_events.logger_destination import LoggerDestination

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler
    from composer.trainer._arguments import TrainerArguments
    from composer.trainer._build import ResolvedArguments
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events.callback import Callback
    from composer_events.engine import Engine
    from composer_events.logger import Logger
    from composer_events.state import State


def choose_destinations(given: TrainerArguments) -> list[LoggerDestination]:
    """Return the given loggers, followed by the recorder, the progress bar and the console, if enabled."""
    destinations: list[LoggerDestination] = check_members("loggers", given.loggers, LoggerDestination)
    if not any(isinstance(destination, RunRecorder) for destination in destinations):
        destinations += recorder_of_environment()
    for destination in destinations:
        if isinstance(destination, FileLogger | RunRecorder):
            # A resumed run continues its files; any other run must not append to those of an earlier one.
            destination.is_resuming = given.autoresume
    if given.progress_bar and not _is_given("progress_bar", ProgressBarLogger, destinations):
        interval = None if given.is_default("console_log_interval") else given.console_log_interval
        destinations.append(ProgressBarLogger(given.console_stream, given.log_traces, interval))
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
        elif isinstance(destination, ProgressBarLogger) and isinstance(error, Exception):
            destination.leave_bars()
    # An error that all ranks raise alike would only be repeated.
    if of_others is not None and isinstance(error, Exception) and str(error) not in of_others:
        error.add_note(of_others.rstrip())  # the cause is on another rank, with the more useful traceback


def show_end(state: State) -> None:
    """Write the end of training to the console, with the folders of the recorders."""
    folders: list[str] = []
    for each in state.callbacks:
        with suppress(RuntimeError):  # the folder could not be written
            folders += [str(each.folder)] if isinstance(each, RunRecorder) else []
    for destination in state.callbacks:
        if isinstance(destination, TextLogger):
            destination.show_end(state, folders)


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
        *OLDER_NAMES_ONLY,
    }
)


def log_arguments(given: TrainerArguments, parts: ResolvedArguments, state: State, logger: Logger) -> dict[str, Any]:
    names = [each.name for each in fields(given) if each.name != "defaults"]
    used = [name for name in names if name not in _ONLY_IF_USED or not given.is_default(name)]
    hparams = extract_hparams(
        {name: getattr(given, name) for name in used}
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
            "is_model_compiled": parts.is_compiled,
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
        raise TypeError(f"profiler={profiler!r} is not a composer.profiler.Profiler.")
    warnings.warn(
        "The profiler is enabled. Using the profiler adds additional overhead when training.",
        stacklevel=user_stacklevel(),
    )
    for name in profiler.remote_filenames:
        sender = maybe_create_remote_uploader_downloader_from_uri(name, destinations)
        if sender is not None:
            destinations.append(sender)


def bind_profiler(profiler: Profiler | None, state: State, saver: CheckpointSaver | None) -> None:
    if profiler is None:
        return
    state.profiler = profiler
    profiler.bind_to_state(state)
    if saver is not None:
        # The saver comes after the callbacks of the profiler, so that checkpoints include their state of the same
        # event.
        state.callbacks.remove(saver)
        state.callbacks.append(saver)


def set_log_level(level: Any) -> None:
    """Set the level of Composer's loggers, and log with time, rank, process and thread.

    Without a level, nothing is configured. The levels of other loggers are not changed.
    """
    if level is None:
        return
    known = logging.getLevelNamesMapping()
    if not isinstance(level, str) or level.upper() not in known:
        raise ValueError(f"python_log_level={level!r} must be None or one of {', '.join(map(str.lower, known))}.")
    who = f"rank{get_global_rank()}[%(process)d][%(threadName)s]"
    logging.basicConfig(format=f"%(asctime)s: {who}: %(levelname)s: %(name)s: %(message)s")
    # The packages below this one log under their own names.
    packages = (re.match(r"composer[\w-]*", each) for each in metadata.requires("composer-suite") or ())
    for name in {"composer", *(match[0].replace("-", "_") for match in packages if match)}:
        logging.getLogger(name).setLevel(level.upper())


def check_uploaders(arguments: TrainerArguments, listeners: Iterable[object]) -> None:
    """Reject uploading loggers from which a resumed run could not load."""
    for listener in listeners:
        # Only a RemoteUploaderDownloader has these attributes; importing the class would be slow.
        num_uploads: int = getattr(listener, "num_concurrent_uploads", 1)
        if arguments.autoresume and num_uploads != 1:
            raise ValueError(
                "Multiple concurrent uploads is not currently supported when using autoresume, and a "
                f"RemoteUploaderDownloader has num_concurrent_uploads={num_uploads!r}: the latest "
                "checkpoint could be named before it has arrived. Set it to 1."
            )
        if arguments.save_latest_filename is not None and not getattr(listener, "has_default_names", True):
            raise ValueError(
                "Specifying a `file_path_format_string` to a `RemoteUploaderDownloader` is not currently supported "
                f"while save_latest_filename={arguments.save_latest_filename!r}: it is "
                f"{cast(Any, listener).file_path_format_string!r}, and what the latest one points to would have "
                "another name. Leave it out, or pass save_latest_filename=None."
            )


def choose_saver(
    arguments: TrainerArguments, callbacks: Iterable[Callback], run_name: str | None
) -> CheckpointSaver | None:
    """Return the saver among the callbacks, or the one from the arguments, or `None`."""
    if arguments.load_ignore_keys is not None:
        check_ignore_keys("load_ignore_keys", arguments.load_ignore_keys)
    saver: Any = next((callback for callback in callbacks if callback.saves_checkpoints), None)
    if saver is None:
        saver = _make_saver(arguments)
    if arguments.autoresume:
        _check_autoresume(arguments, saver, run_name)
    if saver is None and arguments.save_async:
        raise ValueError("save_async=True but save_folder=None, so nothing is saved. Give save_folder, too.")
    for name, missing, is_there in (
        ("load_weights_only", "load_path", arguments.load_path is not None),
        ("save_artifact_name", "save_folder", saver is not None),
        ("save_latest_artifact_name", "save_folder", saver is not None),
    ):
        value = getattr(arguments, name)
        if value and not is_there:
            warnings.warn(
                f"{name}={value!r} has no effect without {missing}, which is None. Give {missing} too, or leave the "
                "other out.",
                stacklevel=user_stacklevel(),
            )
    return saver


def _make_saver(arguments: TrainerArguments) -> CheckpointSaver | None:
    if arguments.save_folder is None:
        return None
    # Here, because the import takes as long as the rest of the Trainer, and not every run saves.
    from composer_checkpoint.saver import CheckpointSaver
    from composer_checkpoint.stores.base import parse_uri

    folder = os.fspath(arguments.save_folder)
    inside = parse_uri(folder).path.strip("/")
    prefix = f"{inside}/" if inside else ""
    remote, latest = arguments.save_artifact_name, arguments.save_latest_artifact_name
    if remote is None:
        # Object names do not begin with a slash.
        remote = prefix + os.fspath(arguments.save_filename).lstrip("/")
    if latest is None and arguments.save_latest_filename is not None:
        latest = prefix + os.fspath(arguments.save_latest_filename).lstrip("/")
    return CheckpointSaver(
        folder,
        arguments.save_filename,
        remote,
        arguments.save_latest_filename,
        latest,
        arguments.save_interval,
        overwrite=arguments.save_overwrite,
        num_checkpoints_to_keep=arguments.save_num_checkpoints_to_keep,
        weights_only=arguments.save_weights_only,
        ignore_keys=arguments.save_ignore_keys,
        async_save=arguments.save_async,
        save_async_policy=arguments.save_async_policy,
        keep=arguments.save_keep,
    )


def _check_autoresume(arguments: TrainerArguments, saver: CheckpointSaver | None, run_name: str | None) -> None:
    if run_name is None:
        raise ValueError(
            "When autoresume=True, the `run_name` must be specified: a run that is started again is known by it. Give "
            "run_name='...', or set COMPOSER_RUN_NAME."
        )
    if saver is None:
        raise ValueError(
            f"The `save_folder` must be specified when autoresume is enabled, and it is {arguments.save_folder!r}: it "
            "is where the checkpoints are looked for."
        )
    if saver.latest_filename is None:
        raise ValueError(
            "The `save_latest_filename` must be specified so autoresume knows where to load checkpoints from, and it "
            "is None. Leave it out, or give a name."
        )
    if saver.weights_only:
        raise ValueError(
            "autoresume=True needs what save_weights_only=True does not save: optimizers, time and random numbers. "
            "Leave out one of them."
        )


def load_at_start(
    arguments: TrainerArguments, saver: CheckpointSaver | None, state: State, logger: Logger, engine: Engine
) -> None:
    """Load the checkpoint to start from or to resume. Every rank must call this."""
    if not arguments.autoresume or saver is None:
        _load(arguments, state, logger, engine)
        return
    from composer_checkpoint.resume import checkpoint_to_resume  # cheap here: the saver has imported it

    with checkpoint_to_resume(saver, state, logger) as path:
        if path is not None:
            # A resumed run continues completely, even if its first start loaded only parts of `load_path`.
            arguments = replace(
                arguments,
                load_path=path,
                load_object_store=None,
                load_weights_only=False,
                load_ignore_keys=None,
                load_exclude_algorithms=None,
            )
        _load(arguments, state, logger, engine)


def _load(arguments: TrainerArguments, state: State, logger: Logger, engine: Engine) -> None:
    if arguments.load_path is None:
        return
    from composer_checkpoint.stores.base import parse_uri  # a slow import that not every run needs

    path, store = os.fspath(arguments.load_path), arguments.load_object_store
    if store is not None and parse_uri(path).backend:
        # The given store replaces the one that the URI names.
        path = parse_uri(path).path
    # Passed only if set: users' test suites replace this function by one with Composer's arguments only.
    chosen = {"trusted": arguments.load_trusted, "restart_epoch": arguments.load_restart_epoch}
    # Called through the module, in which they replace it.
    checkpoint.load_checkpoint(
        state=state,
        logger=logger,
        path=path,
        object_store=store,
        load_weights_only=arguments.load_weights_only,
        strict_model_weights=arguments.load_strict_model_weights,
        progress_bar=arguments.load_progress_bar,
        ignore_keys=arguments.load_ignore_keys,
        exclude_algorithms=arguments.load_exclude_algorithms,
        algorithm_passes=engine.algorithm_passes,
        **{name: True for name, is_chosen in chosen.items() if is_chosen},
    )
    stamp = state.timestamp
    if not stamp.num_iterations and not int(stamp.epoch_in_iteration) and not int(stamp.token_in_iteration):
        # Checkpoints of old releases do not have iterations.
        state.timestamp = stamp.copy(epoch_in_iteration=stamp.num_epochs, token_in_iteration=stamp.num_tokens)
