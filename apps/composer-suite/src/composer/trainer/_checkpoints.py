"""Saving, loading and resuming, as chosen by the arguments of the Trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from composer.trainer._arguments import user_stacklevel
from composer.utils import checkpoint
from composer_checkpoint.ignore_keys import check_ignore_keys
from composer_events.arguments import loaded, to_interval

if TYPE_CHECKING:
    from composer.trainer._arguments import TrainerArguments
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events.callback import Callback
    from composer_events.engine import Engine
    from composer_events.logger import Logger
    from composer_events.state import State


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
    saver = find_saver(callbacks) or _make_saver(arguments)
    if arguments.autoresume:
        _check_autoresume(arguments, saver, run_name)
    if saver is None:
        _check_without_folder(arguments)
    if arguments.load_weights_only and arguments.load_path is None:
        _warn_of_no_effect("load_weights_only=True", "load_path")
    return saver


def _check_without_folder(arguments: TrainerArguments) -> None:
    """Check arguments that are unused without a folder, so that a trial run reveals mistakes in them."""
    if arguments.save_async:
        raise ValueError("save_async=True but save_folder=None, so nothing is saved. Give save_folder, too.")
    to_interval("save_interval", arguments.save_interval)
    if arguments.save_num_checkpoints_to_keep != -1 or arguments.save_keep is not None:
        from composer_checkpoint.retention import combine_policies  # a slow import that not every run needs

        combine_policies(arguments.save_num_checkpoints_to_keep, arguments.save_keep)
    for name in ("save_artifact_name", "save_latest_artifact_name"):
        value = getattr(arguments, name)
        if value is not None:
            _warn_of_no_effect(f"{name}={value!r}", "save_folder")


def _warn_of_no_effect(given: str, missing: str) -> None:
    warnings.warn(
        f"{given} has no effect without {missing}, which is None. Give {missing} too, or leave the other out.",
        stacklevel=user_stacklevel(),
    )


def find_saver(callbacks: Iterable[Callback]) -> CheckpointSaver | None:
    """Return the first saver among the callbacks."""
    module = loaded("composer_checkpoint.saver")  # an instance exists only after this import
    if module is None:
        return None
    saver: Any = next((callback for callback in callbacks if isinstance(callback, module.CheckpointSaver)), None)
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


def check_load_path(arguments: TrainerArguments, state: State) -> None:
    """Raise on all ranks if a local checkpoint to load does not exist. Every rank must call this.

    With `autoresume`, the path is known only after the search for checkpoints, and is not checked here.

    Raises:
        NoCheckpointError: If it does not exist.
    """
    if arguments.load_path is not None and arguments.load_object_store is None and not arguments.autoresume:
        from composer_checkpoint.loader import check_local_path  # a slow import that not every run needs

        check_local_path(os.fspath(arguments.load_path), state)


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
