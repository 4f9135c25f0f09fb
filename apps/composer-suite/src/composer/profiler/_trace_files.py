"""Folders and files of traces, shared by the trace handlers and `TorchProfiler`."""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_checkpoint.save_folder import ensure_folder_is_empty
from composer_dist import dist
from composer_events.event import ProfilerAction

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = [
    "END",
    "RECORDING",
    "append_events",
    "durations",
    "open_name",
    "prepare_folder",
    "prune",
    "warn_of_no_trace",
    "describes_process",
    "describes_thread",
    "process_facts",
]

_log = logging.getLogger(__name__)

END = "\n]\n"  # end of a list with one event per line, which `append_events` overwrites
RECORDING = (ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE)  # not warmup, whose events are discarded


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Create a folder, which must be empty unless files may be overwritten. Every rank must call this.

    Raises:
        FileExistsError: If the folder is not empty and `overwrite` is false.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not overwrite:
        ensure_folder_is_empty(folder)
    dist.barrier()  # no rank may write before all of them have checked


def prune(paths: list[str], num_to_keep: int) -> None:
    """Delete the oldest files until `num_to_keep` are left; keep all if it is negative."""
    while 0 <= num_to_keep < len(paths):
        Path(paths.pop(0)).unlink(missing_ok=True)


def open_name(folder: Path, name: str) -> Path:
    """Return a file's path in a folder, and create its parents."""
    path = folder / name
    os.makedirs(path.parent, exist_ok=True)
    return path


def warn_of_no_trace(folder: Path, state: "State") -> None:
    """Log a warning that training failed before the first trace."""
    _log.warning(
        "No trace was written to %s: training has failed at batch %d, before the schedule began to record. To see what "
        "led to it, give cyclic_schedule() fewer batches of skip_first, wait and warmup.",
        folder,
        state.timestamp.num_batches,
    )


def durations(path: str) -> Iterator[dict[str, Any]]:
    """Yield the begin and end events of a list with one event per line, without loading all of it."""
    with open(path) as file:
        for line in file:
            # Parsing only these lines is much faster.
            if '"ph": "B"' in line or '"ph": "E"' in line:
                event = json.loads(line.rstrip(",\n"))
                if event["ph"] in "BE":  # the text above may be in the arguments of another event
                    yield event


def append_events(path: str, events: Iterable[dict[str, Any]]) -> None:
    """Append events to a file with a list of them, without parsing it. The file is replaced atomically.

    Raises:
        TypeError: If the file does not end as such a list.
    """
    unfinished = f"{path}.unfinished"
    # A copy, so that neither a reader nor an interruption leaves half a list.
    shutil.copyfile(path, unfinished)
    with open(unfinished, "rb+") as file:
        # Only the end is read, since a trace may be larger than memory.
        end = END.encode()
        file.seek(-min(len(end), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if file.read() != end:
            raise TypeError(f"{path!r} does not end as a merged trace. Merge the files again with merge_traces.")
        file.seek(-len(end), os.SEEK_END)
        for event in events:
            file.write(f",\n{json.dumps(event)}".encode())
        file.write(end)
    os.replace(unfinished, path)


_DESCRIPTIONS = frozenset({"process_name", "process_sort_index", "process_labels"})


def process_facts(rank: int) -> dict[str, dict[str, Any]]:
    """Return the metadata, by name of the event, of the process of a rank: its name and its order in viewers."""
    return {
        "process_name": {"name": f"Rank {rank} training loop process"},
        "process_sort_index": {"sort_index": rank},
    }


def describes_process(event: dict[str, Any]) -> bool:
    """Return whether an event gives a process its name, order or labels.

    >>> describes_process({"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "python"}})
    True
    """
    return event.get("ph") == "M" and event.get("name") in _DESCRIPTIONS


def describes_thread(event: dict[str, Any], tid: int) -> bool:
    """Return whether an event gives the thread `tid` its name or order.

    >>> describes_thread({"name": "thread_name", "ph": "M", "pid": 7, "tid": 7, "args": {"name": "thread 7"}}, 7)
    True
    """
    return event.get("ph") == "M" and event.get("tid") == tid and str(event.get("name")).startswith("thread_")
