"""The launcher's lines on the console, whose failures must not fail the run, and the report of a failed run.

The report has the output of every failed rank, and the root cause's traceback last.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_dist.launch.workers import Ending

_FILE_NUMBERS = {"stdout": 1, "stderr": 2}


def open_console() -> None:
    """Make stdout and stderr writable, even if they were closed.

    A closed stream (`>&-`) is connected to the null device, for the ranks as well. Characters outside the console's
    encoding are written as escapes.
    """
    for name, number in _FILE_NUMBERS.items():
        if getattr(sys, name) is None:
            _lead_nowhere(number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False, errors="backslashreplace"))
        elif hasattr(getattr(sys, name), "reconfigure"):  # missing if a program replaced the stream
            getattr(sys, name).reconfigure(errors="backslashreplace")


def release_console() -> None:
    """Discard unwritable output, which Python would otherwise write again at exit, with exit code 120."""
    for name, number in _FILE_NUMBERS.items():
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                if getattr(sys, name).fileno() == number:
                    _lead_nowhere(number)


def say(text: str, stream: str = "stdout") -> None:
    """Write a line and flush it."""
    with suppress(OSError, ValueError):  # the console may be closed
        getattr(sys, stream).write(f"{text}\n")
        getattr(sys, stream).flush()


def _lead_nowhere(number: int) -> None:
    """Connect a descriptor to the null device, for this process and its children."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == number:  # the descriptor was closed, and open() reused its number
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)


_MAX_LINES = 200
_MAX_BYTES = 64 * 1024
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LAST_LINES = 20


def crash_report(failures: Sequence["Ending"]) -> str:
    """Return the output of each failed rank that the console has not shown."""
    return "".join(_block(ending, is_root=number == 0) for number, ending in enumerate(failures))


def root_cause(ending: "Ending", others: Sequence[int], folder: str | None) -> str:
    """Return a sentence about the first failure, hints, and last its traceback."""
    when = time.strftime("%H:%M:%S", time.localtime(ending.time))
    which = f"rank {ending.rank} (PID {ending.pid})"
    lines = ["", f"composer: error: {which} failed first: it {ending.what} at {when}."]
    if ending.has_waited:
        lines = ["", f"composer: error: {which} was stopped at {when}: it {ending.what}."]
    lines += [f"composer: {hint}" for hint in _hints(ending, others)]
    if folder is not None:
        lines.append(f"composer: the logs are in {folder}")
    words = _last_words(ending)
    if words:
        lines.append(f"composer: rank {ending.rank} ended{_during(ending)} with:")
    return "\n".join(lines) + "\n" + words  # last, where a terminal keeps it in view


def is_on_console(ending: "Ending") -> bool:
    """Return whether a rank's failure is visible only on the console: it has no log, no traceback and no hint."""
    return not ending.stderr and not _last_words(ending) and not _hints(ending, ())


def waited_for_another(ending: "Ending") -> bool:
    """Return whether a rank ended because it had waited too long for another one, and not for its own data, say."""
    message = str(ending.error.get("message", "")) if ending.error else ""
    words = f"{message}{_last_words(ending)}".lower()
    is_of_ranks = any(each in words for each in ("gloo", "pair closure", "nccl", "collective", "torch/distributed"))
    return is_of_ranks and ("timed out" in words or "timeout" in message.lower())


def join_ranks(ranks: Sequence[int]) -> str:
    """Return sorted ranks as `rank 3` or `ranks 0, 2-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def brief(ending: "Ending", folder: str) -> str:
    """Return a one-line summary, to follow the rank's own output on the console."""
    mark = "" if ending.has_waited else " (root cause)"
    return f"Global rank {ending.rank} (PID {ending.pid}) {ending.what}{mark}. The logs are in {folder}"


def _last_words(ending: "Ending") -> str:
    if ending.error is not None and ending.error.get("traceback"):
        return str(ending.error["traceback"])
    lines = _tail(ending.stderr)[0].splitlines(keepends=True) if ending.stderr else []
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return "".join(lines[-_LAST_LINES:])  # no traceback, as after a crash in C++
    start = starts.pop()
    # Go back to the first traceback of a chain: the cause comes before its consequences.
    while starts and any(link in line for line in lines[starts[-1] : start] for link in _CHAINED):
        start = starts.pop()
    return "".join(lines[start:])


def _block(ending: "Ending", *, is_root: bool) -> str:
    """Return one rank's part. Local rank 0 has no log files, since it writes to the console."""
    mark = " (root cause)" if is_root and not ending.has_waited else ""
    text = f"Global rank {ending.rank} (PID {ending.pid}) {ending.what}{mark}\n"
    if ending.error is not None:
        lines = [f"{ending.error.get('message')}{_during(ending)}", *ending.error.get("notes", ())]
        text += "".join(f"{line}\n" for line in lines)
    for label, path in (("STDOUT", ending.stdout), ("STDERR", ending.stderr)):
        if path:
            content, is_cut = _tail(path)
            if is_root and label == "STDERR":
                content = _without_traceback(content, _last_words(ending))
            cut = f"[the last lines; the others are in {path}]\n" if is_cut else ""
            end = "\n" if content and not content.endswith("\n") else ""
            text += f"----------Begin global rank {ending.rank} {label}----------\n{cut}{content}{end}"
            text += f"----------End global rank {ending.rank} {label}----------\n"
    return text


def _without_traceback(content: str, traceback: str) -> str:
    """Return a rank's stderr without the traceback that the report ends with, which torch may mark with the rank."""
    lines, last = content.splitlines(keepends=True), traceback.splitlines(keepends=True)
    for start in range(len(lines) - len(last) + 1) if last and _TRACEBACK in last[0] else ():
        if all(line.endswith(end) for line, end in zip(lines[start:], last, strict=False)):
            return "".join(
                [*lines[:start], "[the traceback is at the end of this report]\n", *lines[start + len(last) :]]
            )
    return content


def _tail(path: str) -> tuple[str, bool]:
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_BYTES))  # logs can be large
            text = file.read().decode(errors="replace")
    except OSError:
        return "", False
    lines = text.splitlines(keepends=True)
    return "".join(lines[-_MAX_LINES:]), size > _MAX_BYTES or len(lines) > _MAX_LINES


def _hints(ending: "Ending", others: Sequence[int]) -> list[str]:
    message = str(ending.error.get("message", "")).lower() if ending.error else ""
    # SIGKILL and SIGSTOP cannot be caught, so the rank itself leaves no message.
    if ending.exit_code == -9:
        return ["The launcher did not send SIGKILL: the system was out of memory (see dmesg), or a user sent it."]
    if ending.exit_code == -19:
        return ["A suspended rank holds up all others. With --stopped-timeout 0 they would wait until it resumes."]
    if "timed out" in message or "timeout" in message:
        names = ", ".join(map(str, others)) or "none on this node"
        return [
            f"A rank that times out has waited for another one. Ranks that had not failed by then: {names}.",
            "If they are only slow, let the ranks wait longer: Trainer(dist_timeout=...), in seconds.",
        ]
    return []


def _during(ending: "Ending") -> str:
    event = ending.error.get("event") if ending.error else None
    return f" during the event {event}" if event else ""
