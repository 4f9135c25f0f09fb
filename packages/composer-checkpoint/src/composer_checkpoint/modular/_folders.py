"""A folder that ranks fill together, and that appears whole or not at all."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from composer_checkpoint.commit import write_atomically
from composer_checkpoint.hashing import hash_file
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from composer_checkpoint.sharded._ranks import Ranks

__all__ = ["folder_together"]


@contextmanager
def folder_together(folder: str, overwrite: bool, info: Mapping[str, Any]) -> Iterator[str]:
    """Yield a folder for all ranks to write to; at the end it gets a manifest and its real name.

    Every rank must enter and leave it. An exception inside must be raised on all ranks, and nothing is left of the
    folder then.

    Args:
        folder: The real name, on a disk that all ranks see.
        overwrite: Whether a folder of this name may be replaced.
        info: What the manifest shall say about the run.
    """
    ranks = Ranks()
    with ExitStack() as unfinished:  # of rank 0, and empty on the others

        def begin() -> str:
            if ranks.rank:
                return ""
            return str(unfinished.enter_context(write_atomically(folder, overwrite=overwrite, folder=True)))

        place = ranks.exchange(begin, lambda places: [places[0]] * len(places))
        yield place

        def commit() -> None:
            if ranks.rank == 0:
                _seal(Path(place), info)
                unfinished.pop_all().close()

        ranks.together(commit)


def _seal(folder: Path, info: Mapping[str, Any]) -> None:
    """Write the hashes of all files, which are taken from manifests inside where these have them."""
    known: dict[str, FileEntry] = {}
    for manifest in folder.glob(f"*/{MANIFEST_NAME}"):
        inside = manifest.parent.relative_to(folder)
        files = Manifest.from_json(manifest.read_bytes()).files
        known |= {(inside / name).as_posix(): entry for name, entry in files.items()}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    entries = {name: known.get(name) or _entry(folder / name) for name in names}
    (folder / MANIFEST_NAME).write_text(Manifest(files=entries, info=info).to_json())


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, hash_file(path))
