"""What a trace says of processes and threads in it: one name and one place for each, which say the rank."""

from typing import Any

__all__ = ["describes_process", "describes_thread", "process_facts"]

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
