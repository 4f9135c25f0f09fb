"""The folders and files of traces, as both who writes spans and who writes torch's operators keep them."""

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

END = "\n]\n"  # of a list with one event a line
RECORDING = (ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE)  # what is worth a file


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Make a folder, which must be empty unless files may be overwritten. Every rank must call this.

    Raises:
        FileExistsError: If it is not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not overwrite:
        ensure_folder_is_empty(folder)
    dist.barrier()  # no rank writes before all have looked


def prune(paths: list[str], num_to_keep: int) -> None:
    """Delete the oldest files until so many are left; keep all if the number is negative."""
    while 0 <= num_to_keep < len(paths):
        Path(paths.pop(0)).unlink(missing_ok=True)


def open_name(folder: Path, name: str) -> Path:
    """Return a file's path in a folder, whose missing parts are made."""
    path = folder / name
    os.makedirs(path.parent, exist_ok=True)
    return path


def warn_of_no_trace(folder: Path, state: "State") -> None:
    """Say that training has failed too early for a trace."""
    _log.warning(
        "There is no trace in %s: training has failed at batch %d, before the schedule began to record. To see what "
        "led to it, give cyclic_schedule() fewer batches of skip_first, wait and warmup.",
        folder,
        state.timestamp.num_batches,
    )


def durations(path: str) -> Iterator[dict[str, Any]]:
    """Yield the begins and ends of spans in a list with one event a line, without having all of it in memory."""
    with open(path) as file:
        for line in file:
            if '"ph": "B"' in line or '"ph": "E"' in line:
                event = json.loads(line.rstrip(",\n"))
                if event["ph"] in "BE":  # and not the arguments of another event
                    yield event


def append_events(path: str, events: Iterable[dict[str, Any]]) -> None:
    """Put events at the end of a list of them, without reading it; until the longer one is complete, it is as it was.

    Raises:
        TypeError: If the file does not end as such a list.
    """
    unfinished = f"{path}.unfinished"
    shutil.copyfile(path, unfinished)
    with open(unfinished, "rb+") as file:
        end = END.encode()
        file.seek(-min(len(end), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if file.read() != end:
            raise TypeError(f"{path!r} does not end as a merged trace. Merge the files anew with merge_traces.")
        file.seek(-len(end), os.SEEK_END)
        for event in events:
            file.write(f",\n{json.dumps(event)}".encode())
        file.write(end)
    os.replace(unfinished, path)


_DESCRIPTIONS = frozenset({"process_name", "process_sort_index", "process_labels"})


def process_facts(rank: int) -> dict[str, dict[str, Any]]:
    """Return how the process of a rank is called and where it stands among the others, by the names of these facts."""
    return {
        "process_name": {"name": f"Rank {rank} training loop process"},
        "process_sort_index": {"sort_index": rank},
    }


def describes_process(event: dict[str, Any]) -> bool:
    """Answer whether an event gives a process its name, its place or its labels.

    >>> describes_process({"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "python"}})
    True
    """
    return event.get("ph") == "M" and event.get("name") in _DESCRIPTIONS


def describes_thread(event: dict[str, Any], tid: int) -> bool:
    """Answer whether an event gives a certain thread its name or its place.

    >>> describes_thread({"name": "thread_name", "ph": "M", "pid": 7, "tid": 7, "args": {"name": "thread 7"}}, 7)
    True
    """
    return event.get("ph") == "M" and event.get("tid") == tid and str(event.get("name")).startswith("thread_")
