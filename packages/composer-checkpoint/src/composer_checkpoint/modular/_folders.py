"""The folder of a modular checkpoint: ranks fill it together, it appears whole or not at all, and can be verified."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.files import verify_file
from composer_checkpoint.hashing import hash_file
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from composer_checkpoint.sharded import verify_folder
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.sharded._targets import METADATA_NAME

__all__ = ["METADATA_FILENAME", "folder_together", "verify_modular_folder"]

METADATA_FILENAME = "composer_metadata.json"


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


def verify_modular_folder(folder: str | os.PathLike[str]) -> Manifest | None:
    """Compare all files of a modular checkpoint with its manifest; without one, its parts with theirs.

    Returns:
        The manifest, or `None` if there is none.

    Raises:
        CorruptCheckpointError: If a file is missing, or not what was written.
    """
    root = Path(folder)
    if not (root / MANIFEST_NAME).exists():
        for part in sorted(root.iterdir()):
            if part.name != METADATA_FILENAME:
                _verify_part(part)
        return None
    manifest = Manifest.from_json((root / MANIFEST_NAME).read_bytes())
    for name, entry in manifest.files.items():
        path = root / name
        if not path.exists():
            raise CorruptCheckpointError(f"{root} lacks {name}, which was saved with it. Load another checkpoint.")
        if _entry(path) != entry:
            _verify_part(path)  # it knows which tensor was damaged
            raise CorruptCheckpointError(f"{path} is not what was written. Load another checkpoint.")
    return manifest


def _verify_part(path: Path) -> None:
    if path.is_dir() and (path / METADATA_NAME).exists():
        verify_folder(path)
    elif path.is_dir():
        for inside in sorted(path.iterdir()):
            _verify_part(inside)
    elif path.suffix in (".pt", ".pkl", ".safetensors"):
        verify_file(path)


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
