"""Put the traces of several ranks into one file, with their clocks made equal.

python -m composer.profiler.json_trace_merger -o merged.json rank0.json rank1.json
"""

import argparse
import gzip
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, cast

__all__ = ["extend_trace", "main", "merge_traces", "parse_trace", "read_trace"]

_LAST = 99_999
_BACKWARD = "MulBackward0"  # an operator that only the thread of the backward pass runs
_END = "\n]\n"
_MERGED = "merged_trace"  # a fact that a file has whose clocks are equal already


def merge_traces(output_file: str, *trace_files: str, object_form: bool = False) -> None:
    """Merge traces in Chrome's format.

    A file says of itself which rank it is of, and when, by its own clock, a moment was that all ranks have in common;
    the clock of the lowest rank counts. Of several files of a rank, the first goes with the first of the lowest rank,
    and so on. A file that was merged before goes in as it is.

    Args:
        output_file: Where the events go, one a line.
        *trace_files: The files; names that end in `.gz` are compressed by gzip.
        object_form: Write an object with the list inside, as some viewers demand, instead of a list.

    Raises:
        TypeError: If a file holds no trace.
    """
    with open(output_file, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": ' if object_form else "")
        separator = "[\n"
        for event in _merged(trace_files):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n" if object_form else _END)


def extend_trace(merged_file: str, *trace_files: str) -> None:
    """Put the events of further traces at the end of what `merge_traces` has written, without reading it again.

    Args:
        merged_file: A list. Until the longer one is complete, this is there as it was.
        *trace_files: As for `merge_traces`.

    Raises:
        TypeError: If a file holds no trace, or the first one was not written by `merge_traces`.
    """
    unfinished = f"{merged_file}.unfinished"
    shutil.copyfile(merged_file, unfinished)
    with open(unfinished, "rb+") as file:
        end = _END.encode()
        file.seek(-min(len(end), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if file.read() != end:
            raise TypeError(f"{merged_file!r} does not end as a merged trace. Merge the files anew with merge_traces.")
        file.seek(-len(end), os.SEEK_END)
        for event in _merged(trace_files):
            file.write(f",\n{json.dumps(event)}".encode())
        file.write(end)
    os.replace(unfinished, merged_file)


def _merged(trace_files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of traces by the clock of the lowest rank, after one that says so."""
    traces = [read_trace(path) for path in trace_files]
    ranks = [_fact(trace, "global_rank") for trace in traces]
    clocks = [_fact(trace, "clock_sync_timestamp_us") for trace in traces]
    are_merged = [_fact(trace, _MERGED) is not None for trace in traces]
    of_ranks: dict[int, list[int]] = {}
    for rank, clock, is_merged in zip(ranks, clocks, are_merged, strict=True):
        if rank is not None and clock is not None and not is_merged:
            of_ranks.setdefault(rank, []).append(clock)
    lowest = min((rank for rank in ranks if rank is not None), default=0)
    common = of_ranks[min(of_ranks)] if of_ranks else []
    turns = dict.fromkeys(of_ranks, 0)
    yield {"name": _MERGED, "ph": "M", "pid": lowest, "tid": 0, "args": {"value": 1}}
    for trace, rank, clock, is_merged in zip(traces, ranks, clocks, are_merged, strict=True):
        shift = 0
        if rank is not None and clock is not None and not is_merged:
            shift = common[min(turns[rank], len(common) - 1)] - clock
            turns[rank] += 1
        yield from _adjusted(trace, None if is_merged else rank, shift)


def parse_trace(text: str, name: str) -> list[dict[str, Any]]:
    """Return the events of a trace: a list, also one that was cut off, or an object with the list inside.

    Args:
        text: What the file holds.
        name: What it is called, for errors.

    Raises:
        TypeError: If it is no trace.

    Example:
        >>> parse_trace('[{"name": "a"},', "trace.json")
        [{'name': 'a'}]
    """
    text = text.strip()
    try:
        parsed: Any = json.loads(text)
    except json.JSONDecodeError:
        # A list may lack its end, and may have a comma instead: whoever writes one never knows that it is over.
        try:
            parsed = json.loads(text.rstrip(",") + "]")
        except json.JSONDecodeError:
            parsed = None
    events: Any = cast("dict[str, Any]", parsed).get("traceEvents") if isinstance(parsed, dict) else parsed
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in cast("list[Any]", events)):
        raise TypeError(
            f"{name!r} is no trace in Chrome's format: it is {text[:40]!r}... Pass a JSON list of events, or an object "
            "that has them as 'traceEvents'."
        )
    return cast("list[dict[str, Any]]", events)


def main() -> None:
    """Merge the files that the command line names."""
    parser = argparse.ArgumentParser(prog="composer.profiler.json_trace_merger", description=merge_traces.__doc__)
    parser.add_argument("-o", "--output", required=True, help="where the merged trace goes")
    parser.add_argument("--object-form", action="store_true", help="write an object instead of a list")
    parser.add_argument("traces", nargs="+", help="what is merged")
    asked = parser.parse_args()
    merge_traces(asked.output, *asked.traces, object_form=asked.object_form)


def read_trace(path: str) -> list[dict[str, Any]]:
    """Return the events of a file; one whose name ends in `.gz` is compressed by gzip.

    Raises:
        TypeError: If it holds no trace.
    """
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        return parse_trace(file.read(), path)


def _fact(trace: list[dict[str, Any]], name: str) -> int | None:
    """Return the latest value that a trace says of itself."""
    found = None
    for event in trace:
        if event.get("ph") == "M" and event.get("name") == name:
            found = event["args"]["value"]
    return found


def _adjusted(trace: list[dict[str, Any]], rank: int | None, shift_us: float) -> Iterator[dict[str, Any]]:
    backward = {event["tid"] for event in trace if event.get("name") == _BACKWARD and "tid" in event}
    seen: set[tuple[Any, Any]] = {
        (event.get("pid"), event.get("tid")) for event in trace if event.get("name") == "thread_sort_index"
    }
    for event in trace:
        if "pid" not in event or "tid" not in event or "PyTorch Profiler" in str(event["tid"]):
            continue
        if event.get("name") == _MERGED:
            continue
        own_pid, tid = event["pid"], event["tid"]
        if rank is not None:
            event["pid"] = rank
        if "ts" in event:
            event["ts"] += shift_us
        if (own_pid, tid) not in seen:
            seen.add((own_pid, tid))
            order = {"sort_index": 1 if tid in backward else _LAST}
            yield {"name": "thread_sort_index", "ph": "M", "pid": event["pid"], "tid": tid, "args": order}
        yield event


if __name__ == "__main__":
    main()
