"""Which tensors the damaged headers of a torch archive belong to."""

from collections.abc import Iterator
from contextlib import contextmanager

from composer_checkpoint._pickle_inspection import Rehearsal, rehearse
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError
from composer_checkpoint.formats._zip import Entry, Readable, offset_of_data, read_entries
from composer_checkpoint.manifest import PAYLOAD_FOLDER, is_sealed

__all__ = ["naming_tensors"]

_MAX_NAMES = 10


@contextmanager
def naming_tensors(file: Readable) -> Iterator[None]:
    """Add to an error about an archive the names of the tensors whose headers are damaged, if there are any."""
    try:
        yield
    except CorruptCheckpointError as error:
        told = _told(file)
        if told is None:
            raise
        raise CorruptCheckpointError(f"{told}: {error}") from error


def _told(file: Readable) -> str | None:
    try:
        entries = read_entries(file)
    except CheckpointError:
        return None  # the directory itself is damaged
    exactly = is_sealed(file)
    damaged = [entry for entry in entries if _is_damaged(file, entry, exactly)]
    if not damaged:
        return None
    rehearsal = _rehearsal(file, entries)
    names = " and ".join(_names(entry, rehearsal) for entry in damaged[:_MAX_NAMES])
    more = f" and of {len(damaged) - _MAX_NAMES} more" if len(damaged) > _MAX_NAMES else ""
    return f"the header of {names}{more}, at byte {damaged[0].header_offset}, is damaged"


def _is_damaged(file: Readable, entry: Entry, exactly: bool) -> bool:
    try:
        offset_of_data(file, entry, exactly=exactly)  # others than torch may have written what has no seal
    except CheckpointError:
        return True
    return False


def _rehearsal(file: Readable, entries: list[Entry]) -> Rehearsal:
    """Return what the pickle says, as far as it can be read."""
    try:
        pickled = next(entry for entry in entries if _inside(entry) == "data.pkl")
        return rehearse(file.read(offset_of_data(file, pickled), pickled.size_bytes), record_unknown=True)
    except (CheckpointError, StopIteration):
        return Rehearsal()


def _names(entry: Entry, rehearsal: Rehearsal) -> str:
    key = _inside(entry).removeprefix(PAYLOAD_FOLDER)
    names = [name for name, tensor in rehearsal.tensors.items() if tensor.storage.key == key]
    return " and ".join(names[:_MAX_NAMES]) or repr(entry.name[:200])


def _inside(entry: Entry) -> str:
    return entry.name.partition("/")[2]
