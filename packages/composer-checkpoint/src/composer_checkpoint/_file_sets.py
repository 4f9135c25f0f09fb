"""Several files that get their names together: all of them, or none.

No system renames several files in one step. So what is renamed is one file, the record, which says which temporary
file gets which name; it appears once all of them are on the disk. Who is killed afterwards leaves a record, by which
the renames are completed; who is killed before leaves none, and the old files as they were.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from composer_checkpoint._durability import sync_path
from composer_checkpoint._unfinished_names import UNFINISHED

__all__ = ["complete_set", "describe_set", "finals_of", "temporaries_of"]

log = logging.getLogger(__name__)


def describe_set(finals: Mapping[Path, Path], folder: Path) -> str:
    """Return the content of the record: each file's name and its temporary one, both counted from the folder."""
    return json.dumps({os.path.relpath(final, folder): temporary.name for final, temporary in finals.items()})


def finals_of(record: Path) -> set[Path]:
    """Return the files whose names a record gives."""
    return {record.parent / name for name in _read(record)}


def temporaries_of(record: Path) -> set[Path]:
    """Return the temporary files that a record names."""
    return {(record.parent / name).with_name(temporary) for name, temporary in _read(record).items()}


def complete_set(record: Path) -> None:
    """Give the files of a record their names, as far as they do not have them, and delete the record.

    Raises:
        OSError: If the file system refuses; the record stays for the next attempt.
    """
    folder = record.parent
    for name, temporary in _read(record).items():
        final = folder / name
        unfinished = final.with_name(temporary)
        if unfinished.is_file():
            os.replace(unfinished, final)
            sync_path(final.parent)
            log.warning("Gave %s its name: a writer that is gone had written it, and not come to renaming it.", final)
    record.unlink()
    sync_path(folder)


def _read(record: Path) -> dict[str, str]:
    """Return what a record says, or nothing if it is none: it must not rename what is elsewhere or no temporary."""
    try:
        names: Any = json.loads(record.read_bytes())
        sound = all(_is_sound(name, temporary) for name, temporary in names.items())
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}
    return names if sound else {}


def _is_sound(name: str, temporary: str) -> bool:
    path = PurePath(name)
    leads_out = path.is_absolute() or ".." in path.parts
    found = UNFINISHED.fullmatch(temporary)
    return not leads_out and found is not None and found["kind"] == "tmp" and path.name.startswith(found["name"])
