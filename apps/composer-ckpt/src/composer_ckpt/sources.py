"""Opening what a command was given, here or in a store."""

import os
import posixpath
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from composer_checkpoint import NoCheckpointError, UnsafeCheckpointError, verify_file
from composer_checkpoint import verify as verify_checkpoint
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.tensors import TensorSource, find_kind, open_checkpoint
from composer_checkpoint.tensors.opening import Kind, follow_pointers
from composer_checkpoint.uris import get_file, is_uri, maybe_create_object_store_from_uri, parse_uri
from composer_ckpt.outcomes import UsageError

__all__ = ["fetched", "find_files", "opened", "place_of", "verify_hashes"]

_RANK = "{rank}"


@contextmanager
def opened(
    path: str, kind: str = "auto", *, tmp_dir: str | None = None, verify: bool = False, **options: Any
) -> Iterator[TensorSource]:
    """Open a checkpoint, here or in a store.

    Args:
        path: As it was typed.
        kind: What it is, `'auto'` to find out.
        tmp_dir: Where what is fetched lies meanwhile.
        verify: Whether to compare it with its hashes first, as far as it has any.
        **options: Of `open_checkpoint`.

    Raises:
        UsageError: If nothing is there that is known as a checkpoint.
        CorruptCheckpointError: If it is not what was written.
    """
    with fetched(path, tmp_dir) as local:
        found = _kind_of(local) if kind == "auto" else cast(Kind, kind)
        if verify:
            verify_hashes(place_of(local), found)
        with open_checkpoint(local, kind=found, **options) as source:
            yield source


@contextmanager
def fetched(path: str, tmp_dir: str | None = None) -> Iterator[str]:
    """Yield where a checkpoint lies on this machine; what is in a store is fetched for as long as it is used."""
    if not path:
        raise UsageError("SRC='' is no path. Name a checkpoint.")
    if not is_uri(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="composer-ckpt-", dir=tmp_dir) as folder:
        yield _fetch(path, Path(folder))


def verify_hashes(place: Path, kind: str) -> list[bool]:
    """Compare every byte with its hash, and say for each file or folder whether it has any.

    Raises:
        CorruptCheckpointError: If a byte is not what was written.
    """
    if kind == "deepspeed":  # its files name classes of DeepSpeed's own, and have no manifest
        return [False for _ in find_files(place, kind)]
    check = verify_checkpoint if kind in ("dcp", "modular") else verify_file
    return [check(path) is not None for path in find_files(place, kind)]


def find_files(place: Path, kind: str) -> Iterator[Path]:
    """Yield what is verified of a checkpoint, one after the other: files, an index for all that it names, a folder."""
    match kind:
        case "local":
            yield from sorted(place.parent.glob(place.name.replace(_RANK, "[0-9]*")))
        case "hf":
            index = [*place.glob("*.safetensors.index.json")]
            yield from index or sorted([*place.glob("*.safetensors"), *place.glob("*.bin")])
        case "deepspeed":
            yield from sorted([*place.glob("*_states.pt"), *place.glob("*/*_states.pt")])
        case _:
            yield place


def place_of(path: str) -> Path:
    """Return the folder or file that a path leads to."""
    return Path(follow_pointers(path))


def _kind_of(local: str) -> Kind:
    try:
        return find_kind(follow_pointers(local))
    except NoCheckpointError as error:
        raise UsageError(str(error)) from error


def _fetch(address: str, folder: Path) -> str:
    """Fetch a file, the files of all ranks, or all of a folder, and return where it lies."""
    wanted = parse_uri(address).path.rstrip("/")
    name = posixpath.basename(wanted)
    file = folder / (name.removesuffix(".symlink") or "checkpoint")
    if "." in name and _RANK not in name:
        with suppress(FileNotFoundError):  # then it is a folder with a dot in its name
            get_file(address, file, progress_bar=False)
            return os.fspath(file)
    store = maybe_create_object_store_from_uri(address)
    if store is None:
        raise UsageError(f"SRC={address!r} is no address. Check it.")
    with store:
        objects = _objects(store, wanted, name)
        for found, relative in objects.items():
            if {"..", ""} & {*relative.split("/")}:
                raise UnsafeCheckpointError(
                    f"{address!r} has an object {found!r:.200}, outside its folder. None is read."
                )
            get_file(found, (folder if _RANK in name else file) / relative, store, progress_bar=False)
        if not objects:
            if _RANK in name:
                raise NoCheckpointError(f"there are no files {address!r}, with numbers for {_RANK}. Check the address.")
            get_file(wanted, file, store, progress_bar=False)
    return os.fspath(file)


def _objects(store: ObjectStore, wanted: str, name: str) -> dict[str, str]:
    """Return the objects of all ranks, or those below a folder, with their paths in it."""
    prefix = wanted.removesuffix(name) if _RANK in name else f"{wanted}/"
    below = {found: found.removeprefix(prefix) for found in store.list_objects(prefix) if found.startswith(prefix)}
    below = {found: relative for found, relative in below.items() if relative and not relative.endswith("/")}
    if _RANK not in name:
        return below
    pattern = re.compile(re.escape(name).replace(re.escape(_RANK), "[0-9]+"))
    return {found: relative for found, relative in below.items() if pattern.fullmatch(relative)}
