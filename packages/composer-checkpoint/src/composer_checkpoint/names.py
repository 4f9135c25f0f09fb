"""Names of checkpoints: templates with placeholders, checked before training, and names of unfinished files."""

import hashlib
import os
import posixpath
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, Literal

from composer_events.formatting import OF_RUN, OF_TIME, check_placeholders, format_name_with_dist
from composer_events.formatting import format_name_with_dist_and_time as format_name_with_dist_and_time
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events import State

# Placeholders that grow from each save to the next on their own.
_GROWS: Final = {"batch", "sample", "token", "total_wct"}
_GROWS_WITH_EPOCHS: Final = {"epoch", "iteration"}
_GROWS_INSIDE_EPOCHS: Final = {"batch_in_epoch", "sample_in_epoch", "token_in_epoch", "epoch_wct"}
_DIGITS: Final = re.compile(r"\d{1,4}")
_WIDEST: Final = 99  # far more digits than any count has, and few enough for a file name

_OF_MLFLOW: Final = frozenset({"mlflow_experiment_id", "mlflow_run_id"})
OF_FOLDER: Final = OF_RUN | _OF_MLFLOW
"""The placeholders of a folder for checkpoints."""
OF_SAVE: Final = OF_TIME | _OF_MLFLOW | {"iteration"}
"""The placeholders of a checkpoint."""


class PartialFilePath:
    """A file path whose placeholders are filled in when a file is written.

    Args:
        filename: May have all placeholders of `format_name_with_dist_and_time`, and `{iteration}`. A leading `/` is
            ignored below a folder.
        folder: May have `{run_name}` and the placeholders of ranks.

    Example:
        >>> path = PartialFilePath("ep{epoch}-ba{batch}.pt", "runs/{run_name}")
        >>> path.format(None, keep_placeholders=True)
        'runs/{run_name}/ep{epoch}-ba{batch}.pt'
    """

    def __init__(self, filename: str, folder: str | None = None) -> None:
        self.filename = filename
        self.folder = folder

    def format(self, state: "State", keep_placeholders: bool = False) -> str:
        """Return the path at the current time.

        Args:
            state: Holds the `run_name` and the `timestamp`.
            keep_placeholders: Whether to join the two parts without filling in placeholders.

        Raises:
            ValueError: If a value, such as a run named `..`, would lead out of the folder.
        """
        if keep_placeholders:
            return self.filename if self.folder is None else os.path.join(self.folder, self.filename.lstrip("/"))
        iteration = int(state.timestamp.iteration)
        name = format_name_with_dist_and_time(self.filename, state.run_name, state.timestamp, iteration=iteration)
        if ".." in PurePosixPath(name).parts:
            raise ValueError(
                f"filename={self.filename!r} became {name!r}, which leads out of its folder. Use a run_name (it is "
                f"{state.run_name!r}) without '..'."
            )
        if self.folder is None:
            return name
        return os.path.join(format_name_with_dist(self.folder, state.run_name), name.lstrip("/"))


def sharded_folder(filename: str, prefix_dir: str | None) -> str:
    """Return the folder of a sharded checkpoint: the folder part of the file name, then the prefix.

    Example:
        >>> sharded_folder("seed1/ep{epoch}-rank{rank}.pt", "ep{epoch}-ba{batch}")
        'seed1/ep{epoch}-ba{batch}'
    """
    return posixpath.join(posixpath.dirname(filename), prefix_dir or "")


def is_tar(name: str | os.PathLike[str]) -> bool:
    """Return whether a file name is that of a tar archive: `tar` among its last two suffixes, or `.tgz`.

    Example:
        >>> [is_tar(name) for name in ("x.tar.gz", "x.tgz", "tar.xyz", "tar", "tar.foo.xyz")]
        [True, True, True, False, False]
    """
    parts = str(name).split(".")
    return (len(parts) > 1 and "tar" in parts[-2:]) or (parts[-1] == "tgz" and len(parts) > 1)


def placeholders(template: str) -> set[str]:
    """Return the names of a template's placeholders.

    Raises:
        ValueError: If a brace is not closed or not opened.
    """
    return {name for _, name, _, _ in _parse("template", template) if name is not None}


def check_filename(
    template: str,
    *,
    argument: str = "save_filename",
    interval: Time[Any] | str | int | None = None,
    overwrite: bool = False,
) -> None:
    """Raise, before any training step, if a template cannot name the checkpoints of a run.

    Subfolders are allowed. Unknown placeholders stay as they are, with a warning. Two saves must not get the same name,
    since the second would replace the first. With an interval of epochs or iterations, names differ by any of
    `{epoch}`, `{iteration}`, `{batch}`, `{sample}`, `{token}` and `{total_wct}`. With other intervals they differ by
    one of the last four, or by `{epoch}` with a count inside the epoch such as `{batch_in_epoch}`. An interval of
    `'1dur'`, which saves once, needs none.

    Args:
        template: The file name.
        argument: The name of the argument, for errors.
        interval: How often checkpoints are saved; an `int` is a number of epochs. `None` if unknown, such as for a
            function: then any placeholder of a time is sufficient.
        overwrite: Whether several checkpoints may have the same name.

    Raises:
        ValueError: If the template is empty, leads out of its folder, is malformed, accesses attributes
            (`{epoch.real}`), or gives two saves the same name.

    Warns:
        UserWarning: If a placeholder is unknown.
    """
    if not template.strip("/ ") or template.endswith("/") or "\0" in template:
        raise ValueError(
            f"{argument}={template!r} is not a file name. Give one such as 'ep{{epoch}}-ba{{batch}}-rank{{rank}}.pt'."
        )
    if ".." in template.replace("\\", "/").split("/"):
        raise ValueError(
            f"{argument}={template!r} leads out of the folder. Name a file in it or in a folder below it, and choose "
            f"another folder with save_folder."
        )
    names: set[str] = set()
    for _, name, spec, _ in _parse(argument, template):
        if name is None or spec is None:
            continue
        names.add(name)
        if not name.isidentifier():
            # Such as `{}` or `{epoch.real}`, which `str.format` allows and no placeholder of this package needs.
            raise ValueError(
                f"{argument}={template!r} has the placeholder {{{name}}}, which is not a name. Use names such as "
                f"{{epoch}} and {{batch}}, or double the braces to have them in the file name."
            )
        if any(int(width) > _WIDEST for width in _DIGITS.findall(spec)) or "{" in spec:
            raise ValueError(
                f"{argument}={template!r} has the format {spec!r}, which is too wide for a file name. Use one such as "
                f"{{{name}:06d}}."
            )
    check_placeholders(OF_SAVE, **{argument: template})
    if not overwrite and not _tells_apart(names, interval):
        raise ValueError(
            f"{argument}={template!r} gives several checkpoints one name, so that each save would replace the one "
            f"before (save_interval={interval if interval is None else str(interval)!r}). Add {{batch}} to it, or pass "
            f"save_overwrite=True if only the newest matters."
        )


def _tells_apart(names: set[str], interval: Time[Any] | str | int | None) -> bool:
    if names & _GROWS:
        return True
    if interval is None:
        return bool(names & (_GROWS_WITH_EPOCHS | _GROWS_INSIDE_EPOCHS))
    every = Time.from_input(interval, TimeUnit.EPOCH)
    if every.unit is TimeUnit.DURATION and every.value >= 1:  # one save, at the end
        return True
    if every.unit in (TimeUnit.EPOCH, TimeUnit.ITERATION):
        return bool(names & _GROWS_WITH_EPOCHS)
    return "epoch" in names and bool(names & _GROWS_INSIDE_EPOCHS)


def _parse(argument: str, template: str) -> "Iterator[tuple[str, str | None, str | None, str | None]]":
    try:
        yield from Formatter().parse(template)
    except ValueError as error:
        raise ValueError(
            f"{argument}={template!r} is malformed: {error}. Close each brace, and double those that belong to the "
            f"name itself."
        ) from error


# Machine, process ID and start time, so that another process to which the system gave the same ID is told apart.
WRITER_PATTERN = r"[0-9a-f]{8}-[0-9]+-[0-9]+"


def this_writer() -> str:
    """Return a string that identifies this process among all that share a file system.

    Example:
        >>> is_alive(this_writer())
        True
    """
    return _writer(os.getpid())


def is_alive(writer: str) -> bool | None:
    """Return whether a `this_writer` is still running, or `None` if it ran on another machine or before a reboot."""
    machine, pid, started = writer.split("-")
    if machine != _machine():
        return None
    try:
        os.kill(int(pid), 0)  # signal 0 only checks for existence
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process of another user
        pass
    now = _start_time(int(pid))
    # Without a start time the process is gone or a zombie, unless the system has no /proc.
    return now == int(started) if now is not None else not Path("/proc/self/stat").exists()


@cache  # by process, since forks have another ID
def _writer(pid: int) -> str:
    return f"{_machine()}-{pid}-{_start_time(pid) or 0}"


@cache
def _machine() -> str:
    """Return a hash of the scope in which process IDs are unique: the host, its boot and its PID namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # only Linux has these files; elsewhere the host name must do
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, or `None` if it is gone, a zombie, or unknown."""
    try:
        # The second field is the program's name in parentheses, which may itself contain spaces and parentheses.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])  # field 22 of `stat`; the list begins with the fourth


# .tmp-: not finished, or already replaced; never read. .old-: a complete folder, moved aside for an instant where the
# file system cannot swap two names; restored if its writer died in that instant. .set-: the record of a multi-file
# commit.
UNFINISHED = re.compile(rf"(?P<name>.+)\.(?P<kind>tmp|old|set)-(?P<writer>{WRITER_PATTERN})-[0-9a-f]{{8}}", re.DOTALL)
_LONGEST_NAME_BYTES = 255


def sibling_name(final: Path, kind: Literal["tmp", "old", "set"] = "tmp") -> Path:
    """Return a unique path in the same folder that names its writer."""
    mark = f".{kind}-{this_writer()}-{secrets.token_hex(4)}"
    # Cut, since file systems limit names to 255 bytes.
    kept = os.fsencode(final.name)[: _LONGEST_NAME_BYTES - len(mark)]
    # Errors are ignored, since the cut may be inside a character.
    return final.with_name(kept.decode(errors="ignore") + mark)


def is_unfinished(name: str) -> bool:
    """Return whether a file or folder of this name is not yet, or no longer, a checkpoint."""
    found = UNFINISHED.fullmatch(name)
    return found is not None and found["kind"] != "old"
