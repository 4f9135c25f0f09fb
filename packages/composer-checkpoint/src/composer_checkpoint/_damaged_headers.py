"""Names of the tensors whose headers in a torch archive are damaged."""

from collections.abc import Iterator
from contextlib import contextmanager

from composer_checkpoint._pickle_inspection import PickleInspection, inspect_pickle
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError
from composer_checkpoint.formats._zip import Entry, Readable, offset_of_data, read_entries
from composer_checkpoint.manifest import PAYLOAD_FOLDER, is_sealed

__all__ = ["naming_tensors"]

_MAX_NAMES = 10


@contextmanager
def naming_tensors(file: Readable) -> Iterator[None]:
    """Prefix an error about an archive with the names of the tensors whose headers are damaged, if any."""
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
        return None  # the directory itself is damaged, so it lists nothing reliable
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
        # Without a seal, a program other than torch may have written the header, with other fields.
        offset_of_data(file, entry, exactly=exactly)
    except CheckpointError:
        return True
    return False


def _rehearsal(file: Readable, entries: list[Entry]) -> PickleInspection:
    """Return the result of inspecting the pickle, which is empty if the pickle itself is damaged."""
    try:
        pickled = next(entry for entry in entries if _inside(entry) == "data.pkl")
        return inspect_pickle(file.read(offset_of_data(file, pickled), pickled.size_bytes), record_unknown=True)
    except (CheckpointError, StopIteration):
        return PickleInspection()


def _names(entry: Entry, rehearsal: PickleInspection) -> str:
    key = _inside(entry).removeprefix(PAYLOAD_FOLDER)
    names = [name for name, tensor in rehearsal.tensors.items() if tensor.storage.key == key]
    return " and ".join(names[:_MAX_NAMES]) or repr(entry.name[:200])


def _inside(entry: Entry) -> str:
    return entry.name.partition("/")[2]
