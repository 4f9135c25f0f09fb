"""Checks of the Trainer's arguments for saving, loading and resuming, and their use."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from composer.trainer._arguments import user_stacklevel
from composer.utils import checkpoint
from composer_checkpoint.ignore_keys import check_ignore_keys
from composer_events.arguments import to_interval

if TYPE_CHECKING:
    from composer.trainer._arguments import TrainerArguments
    from composer_checkpoint.ignore_keys import IgnoreKeys
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events.callback import Callback
    from composer_events.engine import Engine
    from composer_events.event import Event
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Time

__all__ = ["Loading", "Saving", "check_load_path", "check_uploaders", "choose_saver", "find_saver", "load_at_start"]


@dataclass(frozen=True, slots=True)
class Saving:
    """The arguments `save_*`."""

    save_folder: str | os.PathLike[str] | None
    save_filename: str
    save_latest_filename: str | None
    save_overwrite: bool
    save_interval: Time[Any] | str | int | Callable[[State, Event], bool]
    save_weights_only: bool
    save_ignore_keys: IgnoreKeys | None
    save_num_checkpoints_to_keep: int
    save_keep: Any
    save_async: bool
    save_async_policy: Literal["wait", "skip"]
    save_artifact_name: str | None
    save_latest_artifact_name: str | None

    @classmethod
    def of(cls, given: TrainerArguments) -> Saving:
        """Return the arguments, unchecked."""
        return cls(**_named_as_in(cls, given))


@dataclass(frozen=True, slots=True)
class Loading:
    """The arguments `load_*` and `autoresume`."""

    load_path: str | os.PathLike[str] | None
    load_object_store: Any
    load_weights_only: bool
    load_strict_model_weights: bool
    load_progress_bar: bool
    load_ignore_keys: IgnoreKeys | None
    load_exclude_algorithms: Sequence[str] | None
    load_trusted: bool
    load_restart_epoch: bool
    autoresume: bool

    @classmethod
    def of(cls, given: TrainerArguments) -> Loading:
        """Return the arguments, unchecked."""
        return cls(**_named_as_in(cls, given))


def _named_as_in(arguments: type[Saving | Loading], given: TrainerArguments) -> dict[str, Any]:
    return {field.name: getattr(given, field.name) for field in fields(arguments)}


def check_uploaders(saving: Saving, loading: Loading, listeners: Iterable[Callback]) -> None:
    """Reject uploading loggers from which a resumed run could not load."""
    module: Any = sys.modules.get("composer_checkpoint.remote.logger")  # not imported, so no instance exists
    if module is None:
        return
    uploaders: list[Any] = [each for each in listeners if isinstance(each, module.RemoteUploaderDownloader)]
    for listener in uploaders:
        if loading.autoresume and listener.num_concurrent_uploads != 1:
            raise ValueError(
                "Multiple concurrent uploads is not currently supported when using autoresume, and a "
                f"RemoteUploaderDownloader has num_concurrent_uploads={listener.num_concurrent_uploads!r}: the latest "
                "checkpoint could be named before it has arrived. Set it to 1."
            )
        if saving.save_latest_filename is not None and not listener.has_default_names:
            raise ValueError(
                "Specifying a `file_path_format_string` to a `RemoteUploaderDownloader` is not currently supported "
                f"while save_latest_filename={saving.save_latest_filename!r}: it is "
                f"{listener.file_path_format_string!r}, and what the latest one points to would have another name. "
                "Leave it out, or pass save_latest_filename=None."
            )


def choose_saver(saving: Saving, loading: Loading, callbacks: Iterable[Callback], run_name: str | None) -> Any:
    """Return the saver among the callbacks, or the one from the arguments, or `None`."""
    check_ignore_keys("load_ignore_keys", loading.load_ignore_keys)
    saver = find_saver(callbacks) or _make_saver(saving)
    if loading.autoresume:
        _check_autoresume(saving, saver, run_name)
    if saver is None:
        _check_without_folder(saving)
    if loading.load_weights_only and loading.load_path is None:
        _warn_of_no_effect("load_weights_only=True", "load_path")
    return saver


def _check_without_folder(saving: Saving) -> None:
    """Check arguments that are unused without a folder, so that mistakes show before a run that saves."""
    if saving.save_async:
        raise ValueError("save_async=True but save_folder=None, so nothing is saved. Give save_folder, too.")
    to_interval("save_interval", saving.save_interval)
    if saving.save_num_checkpoints_to_keep != -1 or saving.save_keep is not None:
        from composer_checkpoint.retention import combine_policies  # a slow import that not every run needs

        combine_policies(saving.save_num_checkpoints_to_keep, saving.save_keep)
    names = {
        "save_artifact_name": saving.save_artifact_name,
        "save_latest_artifact_name": saving.save_latest_artifact_name,
    }
    for name, value in names.items():
        if value is not None:
            _warn_of_no_effect(f"{name}={value!r}", "save_folder")


def _warn_of_no_effect(given: str, missing: str) -> None:
    warnings.warn(
        f"{given} has no effect without {missing}, which is None. Give {missing} too, or leave the other out.",
        stacklevel=user_stacklevel(),
    )


def find_saver(callbacks: Iterable[Callback]) -> CheckpointSaver | None:
    """Return the first saver among the callbacks."""
    module: Any = sys.modules.get("composer_checkpoint.saver")  # not imported, so no instance exists
    if module is None:
        return None
    saver: Any = next((callback for callback in callbacks if isinstance(callback, module.CheckpointSaver)), None)
    return saver


def _make_saver(saving: Saving) -> CheckpointSaver | None:
    if saving.save_folder is None:
        return None
    # Here, because the import takes as long as the rest of the Trainer, and not every run saves.
    from composer_checkpoint.saver import CheckpointSaver
    from composer_checkpoint.stores.base import parse_uri

    folder = os.fspath(saving.save_folder)
    inside = parse_uri(folder).path.strip("/")
    remote, latest = saving.save_artifact_name, saving.save_latest_artifact_name
    if remote is None:
        remote = _join(inside, os.fspath(saving.save_filename))
    if latest is None and saving.save_latest_filename is not None:
        latest = _join(inside, os.fspath(saving.save_latest_filename))
    return CheckpointSaver(
        folder,
        saving.save_filename,
        remote,
        saving.save_latest_filename,
        latest,
        saving.save_interval,
        overwrite=saving.save_overwrite,
        num_checkpoints_to_keep=saving.save_num_checkpoints_to_keep,
        weights_only=saving.save_weights_only,
        ignore_keys=saving.save_ignore_keys,
        async_save=saving.save_async,
        save_async_policy=saving.save_async_policy,
        keep=saving.save_keep,
    )


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name.lstrip('/')}" if folder else name.lstrip("/")


def _check_autoresume(saving: Saving, saver: CheckpointSaver | None, run_name: str | None) -> None:
    if run_name is None:
        raise ValueError(
            "When autoresume=True, the `run_name` must be specified: a run that is started again is known by it. Give "
            "run_name='...', or set COMPOSER_RUN_NAME."
        )
    if saver is None:
        raise ValueError(
            f"The `save_folder` must be specified when autoresume is enabled, and it is {saving.save_folder!r}: it is "
            "where the checkpoints are looked for."
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


def check_load_path(loading: Loading, state: State) -> None:
    """Raise on all ranks if a local checkpoint to load does not exist. Every rank must call this.

    With `autoresume`, the path is known only after the search for checkpoints, and is not checked here.

    Raises:
        NoCheckpointError: If it does not exist.
    """
    if loading.load_path is not None and loading.load_object_store is None and not loading.autoresume:
        from composer_checkpoint.loader import check_local_path  # a slow import that not every run needs

        check_local_path(os.fspath(loading.load_path), state)


def load_at_start(
    loading: Loading, saver: CheckpointSaver | None, state: State, logger: Logger, engine: Engine
) -> list[dict[str, Any]] | None:
    """Load the checkpoint to start from or to resume, and return the random states of all ranks.

    Every rank must call this.
    """
    if not loading.autoresume or saver is None:
        return _load(loading, state, logger, engine)
    from composer_checkpoint.resume import checkpoint_to_resume  # cheap here: the saver has imported it

    with checkpoint_to_resume(saver, state, logger) as path:
        if path is not None:
            # A resumed run continues completely, whatever parts of `load_path` its first start loaded.
            loading = replace(
                loading,
                load_path=path,
                load_object_store=None,
                load_weights_only=False,
                load_ignore_keys=None,
                load_exclude_algorithms=None,
            )
        return _load(loading, state, logger, engine)


def _load(loading: Loading, state: State, logger: Logger, engine: Engine) -> list[dict[str, Any]] | None:
    if loading.load_path is None:
        return None
    from composer_checkpoint.stores.base import parse_uri  # a slow import that not every run needs

    path, store = os.fspath(loading.load_path), loading.load_object_store
    if store is not None and parse_uri(path).backend:
        path = parse_uri(path).path
    # Passed only if set: users' test suites patch this function with one that has Composer's arguments only.
    chosen = {"trusted": loading.load_trusted, "restart_epoch": loading.load_restart_epoch}
    # Called through the module, where such patches apply.
    rng = checkpoint.load_checkpoint(
        state=state,
        logger=logger,
        path=path,
        object_store=store,
        load_weights_only=loading.load_weights_only,
        strict_model_weights=loading.load_strict_model_weights,
        progress_bar=loading.load_progress_bar,
        ignore_keys=loading.load_ignore_keys,
        exclude_algorithms=loading.load_exclude_algorithms,
        algorithm_passes=engine.algorithm_passes,
        **{name: True for name, is_chosen in chosen.items() if is_chosen},
    )
    stamp = state.timestamp
    if not stamp.num_iterations and not int(stamp.epoch_in_iteration) and not int(stamp.token_in_iteration):
        # A checkpoint from before there were iterations.
        state.timestamp = stamp.copy(epoch_in_iteration=stamp.num_epochs, token_in_iteration=stamp.num_tokens)
    return rng
