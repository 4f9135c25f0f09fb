"""What `Trainer(profiler=...)` brings with it: its callbacks, its handlers, and who sends its files."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from composer.trainer._caller import level_of_user

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events.logger_destination import LoggerDestination
    from composer_events.state import State

__all__ = ["bind_profiler", "check_profiler"]


def check_profiler(profiler: Any, destinations: list[LoggerDestination]) -> None:
    """Check the argument, warn of what profiling costs, and add to the destinations who sends the profiler's files.

    Raises:
        TypeError: If it is no Profiler.
    """
    if profiler is None:
        return
    from composer.profiler.profiler import Profiler  # few profile, and all would wait for torch's profiler to load
    from composer_checkpoint.remote.logger import maybe_create_remote_uploader_downloader_from_uri

    if not isinstance(profiler, Profiler):
        hint = " Call it: Profiler(schedule, trace_handlers)." if isinstance(profiler, type) else ""
        raise TypeError(f"profiler={profiler!r} is no composer.profiler.Profiler.{hint}")
    warnings.warn(
        "The profiler is enabled. Using the profiler adds additional overhead when training.",
        stacklevel=level_of_user(),
    )
    for name in profiler.remote_filenames:
        sender = maybe_create_remote_uploader_downloader_from_uri(name, destinations)
        if sender is not None:
            destinations.append(sender)


def bind_profiler(profiler: Profiler | None, state: State, saver: CheckpointSaver | None) -> None:
    """Let the state be profiled.

    Args:
        profiler: What profiles it, if anything does.
        state: Its callbacks end with the profiler's.
        saver: What saves checkpoints after all other callbacks had their turn, if the Trainer has made it.
    """
    if profiler is None:
        return
    state.profiler = profiler
    profiler.bind_to_state(state)
    if saver is not None:
        state.callbacks.remove(saver)
        state.callbacks.append(saver)
