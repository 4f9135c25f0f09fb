"""Merge the traces of several ranks into one file, with aligned clocks.

python -m composer.profiler.json_trace_merger -o merged.json rank0.json rank1.json
"""

import argparse
import gzip
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["describes_process", "extend_trace", "main", "merge_traces", "parse_trace", "process_facts", "read_trace"]

_END = "\n]\n"  # of a list with one event per line, which `extend_trace` overwrites
_DESCRIPTIONS = frozenset({"process_name", "process_sort_index", "process_labels"})
_LAST = 99_999  # sort index after those of all other threads
_BACKWARD = "MulBackward0"  # an operator that runs only in the thread of the backward pass
_MERGED = "merged_trace"  # metadata of a file whose clocks are already aligned


def merge_traces(output_file: str, *trace_files: str, object_form: bool = False) -> None:
    """Merge traces in Chrome's format.

    Each file contains its rank, and the time of an instant common to all ranks by its own clock. The clock of the
    lowest rank is the reference. If a rank has several files, the first is aligned with the first file of the lowest
    rank, and so on. A merged file is added unchanged. A file of torch's profiler has a rank but no common time, so it
    is aligned with the file of that rank that covers its time. Each rank becomes one process with one name.

    Args:
        output_file: File to write, with one event per line.
        *trace_files: The files; names that end in `.gz` are compressed by gzip.
        object_form: Write an object that contains the list instead of a list, as some viewers require.
    """
    with open(output_file, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": ' if object_form else "")
        separator = "[\n"
        for event in _merged(trace_files):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n" if object_form else _END)


def extend_trace(merged_file: str, *trace_files: str) -> None:
    """Append the events of further traces to a file written by `merge_traces`, without reading it."""
    unfinished = f"{merged_file}.unfinished"
    # A copy, so that neither a reader nor an interruption leaves half a list.
    shutil.copyfile(merged_file, unfinished)
    with open(unfinished, "rb+") as file:
        # Only the end is read, since a trace may be larger than memory.
        end = _END.encode()
        file.seek(-min(len(end), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if file.read() != end:
            raise TypeError(f"{merged_file!r} does not end as a merged trace. Merge the files with merge_traces.")
        file.seek(-len(end), os.SEEK_END)
        for event in _merged(trace_files):
            file.write(f",\n{json.dumps(event)}".encode())
        file.write(end)
    os.replace(unfinished, merged_file)


def process_facts(rank: int) -> dict[str, dict[str, Any]]:
    """Return the metadata, by name of the event, of the process of a rank: its name and its order in viewers."""
    return {
        "process_name": {"name": f"Rank {rank} training loop process"},
        "process_sort_index": {"sort_index": rank},
    }


def describes_process(event: dict[str, Any]) -> bool:
    """Return whether an event gives a process its name, order or labels."""
    return event.get("ph") == "M" and event.get("name") in _DESCRIPTIONS


@dataclass(frozen=True, slots=True)
class _Trace:
    """The events of a file, and its metadata."""

    events: list[dict[str, Any]]
    rank: int | None
    clock_us: int | None
    torch_rank: int | None
    is_merged: bool

    @property
    def process(self) -> int | None:
        return self.torch_rank if self.rank is None else self.rank

    def own_events(self) -> list[dict[str, Any]]:
        """Return the events, with the process descriptions of torch's profiler replaced."""
        # torch names every process "python", and numbers the GPUs differently on each rank.
        if self.rank is not None or self.torch_rank is None:
            return self.events
        facts = process_facts(self.torch_rank).items()
        described = [{"name": name, "ph": "M", "pid": self.torch_rank, "tid": 0, "args": args} for name, args in facts]
        return described + [event for event in self.events if not describes_process(event)]

    @classmethod
    def read(cls, path: str) -> "_Trace":
        events, facts = _parse(_text(path), path)
        torch_rank = facts.get("global_rank")
        return cls(
            events=events,
            rank=_fact(events, "global_rank"),
            clock_us=_fact(events, "clock_sync_timestamp_us"),
            torch_rank=torch_rank if isinstance(torch_rank, int) else None,
            is_merged=_fact(events, _MERGED) is not None,
        )


def _merged(trace_files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield an event that marks the trace as merged, and all events by the clock of the lowest rank."""
    traces = [_Trace.read(path) for path in trace_files]
    cycles = _cycles(traces)
    lowest = min((trace.rank for trace in traces if trace.rank is not None), default=0)
    yield {"name": _MERGED, "ph": "M", "pid": lowest, "tid": 0, "args": {"value": 1}}
    described: set[tuple[Any, Any]] = set()
    for trace in traces:
        rank = None if trace.is_merged else trace.process
        for event in _adjusted(trace.own_events(), rank, _shift_us(trace, cycles)):
            if describes_process(event):
                fact = event["name"], event["pid"]
                if fact in described:
                    continue
                described.add(fact)
            yield event


def _cycles(traces: Sequence[_Trace]) -> dict[int, list[tuple[int, int]]]:
    """Return, by rank, the beginning of each cycle by the rank's own clock, and the time to add to it.

    Each cycle has its own correction, since clocks drift.
    """
    clocks: dict[int, list[int]] = {}
    for trace in traces:
        if trace.rank is not None and trace.clock_us is not None and not trace.is_merged:
            clocks.setdefault(trace.rank, []).append(trace.clock_us)
    common = clocks[min(clocks)] if clocks else []
    # A rank may have more cycles than the lowest rank, whose last common time then applies.
    return {
        rank: [(clock, common[min(turn, len(common) - 1)] - clock) for turn, clock in enumerate(own)]
        for rank, own in clocks.items()
    }


def _shift_us(trace: _Trace, cycles: dict[int, list[tuple[int, int]]]) -> int:
    """Return the time to add to a trace: that of the last cycle of its rank that began before it."""
    of_rank = [] if trace.is_merged or trace.process is None else cycles.get(trace.process, [])
    # A file of torch has no common time; its last event is within its cycle.
    when_us = trace.clock_us
    if trace.rank is None:
        when_us = max((event["ts"] for event in trace.events if event.get("ph") != "M" and "ts" in event), default=0)
    if not of_rank or when_us is None:
        return 0
    return max((cycle for cycle in of_rank if cycle[0] <= when_us), default=min(of_rank))[1]


def parse_trace(text: str, name: str) -> list[dict[str, Any]]:
    """Return the events of a trace: a list, possibly truncated, or an object that contains it.

    Times are in microseconds since 1970. Those of torch are relative to `baseTimeNanoseconds` and are converted. They
    are rounded to half a microsecond, which floats of this size represent exactly, so that every reader sees the same
    order and nesting of events.

    Example:
        >>> parse_trace('[{"name": "a"},', "trace.json")
        [{'name': 'a'}]
        >>> parse_trace('{"baseTimeNanoseconds": 2000000, "traceEvents": [{"name": "a", "ts": 1.5}]}', "torch.json")
        [{'name': 'a', 'ts': 2001.5}]
    """
    return _parse(text, name)[0]


def _parse(text: str, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of a trace, and the object that contains them."""
    text = text.strip()
    parsed: Any = None
    # The format allows a list without its closing bracket, since writers may be interrupted.
    for form in (text, text.rstrip(",") + "]"):
        with suppress(json.JSONDecodeError):
            parsed = json.loads(form)
            break
    facts: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    events: Any = facts.get("traceEvents") if isinstance(parsed, dict) else parsed
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in cast("list[Any]", events)):
        raise TypeError(
            f"{name!r} is not a trace in Chrome's format: it is {text[:40]!r}... Pass a JSON list of events, or an "
            f"object that has them as 'traceEvents'."
        )
    events = cast("list[dict[str, Any]]", events)
    base_ns = facts.get("baseTimeNanoseconds")
    if isinstance(base_ns, int) and base_ns:
        for event in events:
            _from_1970(event, base_ns)
    return events, facts


def _from_1970(event: dict[str, Any], base_ns: int) -> None:
    """Convert an event's relative time, in microseconds, to the time since 1970."""
    begin_us, duration_us = event.get("ts"), event.get("dur")
    if not isinstance(begin_us, int | float):
        return
    # In integers, since a float cannot hold nanoseconds since 1970.
    begin_ns = base_ns + round(begin_us * 1000)
    event["ts"] = _to_halves_us(begin_ns)
    if isinstance(duration_us, int | float):
        # From the rounded end, so that rounding does not move it past the end of an enclosing event.
        event["dur"] = _to_halves_us(begin_ns + round(duration_us * 1000)) - event["ts"]


def _to_halves_us(time_ns: int) -> float:
    return (time_ns + 250) // 500 / 2


def main() -> None:
    """Merge the files given on the command line."""
    parser = argparse.ArgumentParser(prog="composer.profiler.json_trace_merger", description=merge_traces.__doc__)
    parser.add_argument("-o", "--output", required=True, help="the merged file to write")
    parser.add_argument("--object-form", action="store_true", help="write an object instead of a list")
    parser.add_argument("traces", nargs="+", help="the files to merge")
    asked = parser.parse_args()
    merge_traces(asked.output, *asked.traces, object_form=asked.object_form)


def read_trace(path: str) -> list[dict[str, Any]]:
    """Return the events of a file; names that end in `.gz` are compressed by gzip."""
    return parse_trace(_text(path), path)


def _text(path: str) -> str:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        return file.read()


def _fact(trace: list[dict[str, Any]], name: str) -> int | None:
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
    # Threads without a sort index get one: the backward thread is shown below the main thread, the others at the end.
    for event in trace:
        # Rows of the profiler itself do not belong to a thread.
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
