"""The folder of a modular checkpoint: ranks fill it together, it appears whole or not at all, and can be verified."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.files import verify_file
from composer_checkpoint.hashing import HASH_NAME, hash_file
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from composer_checkpoint.modular.state_dict import get_metadata_state_dict
from composer_checkpoint.safetensors_index import INDEX_SUFFIX
from composer_checkpoint.sharded import verify_folder
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.sharded._targets import METADATA_NAME

__all__ = ["METADATA_FILENAME", "checkpoint_folder", "verify_modular_folder"]

METADATA_FILENAME = "composer_metadata.json"


@contextmanager
def checkpoint_folder(
    path: str | os.PathLike[str], *, overwrite: bool = False, info: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield a folder for the parts of a checkpoint; at the end it gets a manifest and its real name, in one step.

    Every rank must enter and leave it. After an exception, which must be raised on all ranks, nothing is left.

    Args:
        path: The real name, on a disk that all ranks see.
        overwrite: Whether a folder of this name may be replaced.
        info: What the manifest shall say about the run, such as `{"timestamp": {"epoch": 3}}`, by which `find_newest`
            goes. Values that JSON knows.

    Yields:
        The folder's name until then. What is in it has hashes in the manifest, whoever wrote it.

    Raises:
        CheckpointConflictError: If there is something of this name and `overwrite` is false; also a `FileExistsError`.
        StorageError: If a disk fails.

    Example:
        >>> import tempfile, torch
        >>> from composer_checkpoint.modular import save_model_to_disk
        >>> folder = tempfile.mkdtemp()
        >>> with checkpoint_folder(f"{folder}/ep1") as unfinished:
        ...     path = save_model_to_disk(torch.nn.Linear(2, 1), unfinished)
        >>> sorted(os.listdir(f"{folder}/ep1"))
        ['composer_manifest.json', 'composer_metadata.json', 'model']
    """
    ranks = Ranks()
    with ExitStack() as unfinished:  # of rank 0, and empty on the others

        def begin() -> str:
            if ranks.rank:
                return ""
            return str(unfinished.enter_context(write_atomically(path, overwrite=overwrite, folder=True)))

        place = ranks.exchange(begin, lambda places: [places[0]] * len(places))
        yield place

        def commit() -> None:
            if ranks.rank == 0:
                _seal(Path(place), info or {})
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
    elif path.suffix in (".pt", ".pkl", ".safetensors") or path.name.endswith(INDEX_SUFFIX):
        verify_file(path)


def _seal(folder: Path, info: Mapping[str, Any]) -> None:
    """Write the hashes of all files; where manifests inside have them, they are taken from there."""
    if not (folder / METADATA_FILENAME).exists():  # by which the folder is known
        (folder / METADATA_FILENAME).write_text(json.dumps(get_metadata_state_dict(), indent=4))
    known: dict[str, FileEntry] = {}
    for manifest in folder.glob(f"*/{MANIFEST_NAME}"):
        inside = manifest.parent.relative_to(folder)
        found = Manifest.from_json(manifest.read_bytes())
        if found.hash_name == HASH_NAME:
            known |= {(inside / name).as_posix(): entry for name, entry in found.files.items()}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    entries = {name: known.get(name) or _entry(folder / name) for name in names}
    (folder / MANIFEST_NAME).write_text(Manifest(files=entries, info=info).to_json())


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, hash_file(path))
