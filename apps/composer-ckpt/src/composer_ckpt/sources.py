"""Opening of the checkpoints given to a command, local or in an object store."""

import argparse
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch

from composer_checkpoint import NoCheckpointError, UnsafeCheckpointError, find_newest, load_file, verify_file
from composer_checkpoint import verify as verify_checkpoint
from composer_checkpoint.remote.fetch import (
    extract_path_from_symlink,
    get_file,
    is_uri,
    maybe_create_object_store_from_uri,
    parse_uri,
)
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.stores.opening import reach
from composer_checkpoint.tensors import Kind, TensorSource, as_stored, find_kind, follow_pointers, open_checkpoint
from composer_ckpt.output import Result, UsageError

_RANK = "{rank}"
_SYMLINK = ".symlink"
_JOBS = 4


@contextmanager
def opened(
    path: str,
    kind: str = "auto",
    *,
    tmp_dir: str | None = None,
    jobs: int = _JOBS,
    verify: bool = False,
    trust: bool = False,
    **options: Any,
) -> Iterator[TensorSource]:
    """Open a checkpoint, local or in an object store, with arguments of the command line.

    Args:
        path: Path, URI or per-rank files.
        kind: Kind of the checkpoint, or `'auto'` to detect it.
        tmp_dir: Folder for downloads.
        jobs: Number of concurrent downloads.
        verify: Whether to compare it with its hashes first, as far as it has any.
        trust: Whether to load a file that contains more than data, which runs its code.
        **options: Arguments of `open_checkpoint`.

    Raises:
        UsageError: If there is no checkpoint of a known kind.
        CorruptCheckpointError: If it differs from what was written.
        UnsafeCheckpointError: If it contains more than data, and is not trusted.
    """
    with fetched(path, tmp_dir, jobs) as local:
        found = kind_of(local) if kind == "auto" else cast(Kind, kind)
        try:
            if verify:
                verify_hashes(place_of(local), found)
            source = open_checkpoint(local, kind=found, **options)
        except UnsafeCheckpointError:
            if not trust or found not in ("composer", "pt"):
                raise
            source = _load_trusted(place_of(local))
        with source:
            yield source


@contextmanager
def fetched(path: str, tmp_dir: str | None = None, jobs: int = _JOBS) -> Iterator[str]:
    """Yield the local path of a checkpoint; downloads are deleted afterwards."""
    if not is_uri(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="composer-ckpt-", dir=tmp_dir) as folder:
        yield _fetch(path, Path(folder), jobs)


def verify_hashes(place: Path, kind: str) -> list[bool]:
    """Compare all bytes with their hashes, and return for each file or folder whether it has hashes."""
    if kind == "deepspeed":  # files of DeepSpeed have no manifest
        return [False for _ in find_files(place, kind)]
    check = verify_checkpoint if kind in ("dcp", "modular") else verify_file
    return [check(path) is not None for path in find_files(place, kind)]


def find_files(place: Path, kind: str) -> Iterator[Path]:
    """Yield the files to verify. An index stands for the files that it names, and some formats for a folder."""
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
    """Return the folder or file that a path points to."""
    return Path(follow_pointers(path))


def kind_of(local: str) -> Kind:
    """Return the kind of the checkpoint that a path points to; raise a `UsageError` if there is none."""
    try:
        return find_kind(follow_pointers(local))
    except NoCheckpointError as error:
        raise UsageError(str(error)) from error


def _load_trusted(place: Path) -> TensorSource:
    """Load a whole file, which may run code, and return it in the form of a lazily read one."""
    tree = _stored(load_file(place, trusted=True))
    kind = "composer" if isinstance(tree, dict) and "state" in tree else "pt"
    return TensorSource(kind, tree, place.stat().st_size, path=os.fspath(place))


def _stored(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return as_stored(value)
    if isinstance(value, Mapping):
        return {key: _stored(item) for key, item in value.items()}
    return [_stored(item) for item in value] if isinstance(value, list | tuple) else value


def _fetch(address: str, folder: Path, jobs: int) -> str:
    wanted = parse_uri(address).path.rstrip("/")
    name = posixpath.basename(wanted)
    file = folder / (name.removesuffix(_SYMLINK) or "checkpoint")
    # A dot suggests a file, which takes one request; a folder needs a listing.
    if "." in name and _RANK not in name:
        with suppress(FileNotFoundError):  # a folder with a dot in its name
            get_file(address, file, progress_bar=False)
            return os.fspath(file)
    store = maybe_create_object_store_from_uri(address)
    if store is None:
        raise UsageError(f"SRC={address!r} is not a URI. Check it.")
    reach(store, address)
    with store:
        objects = _objects(store, wanted, name) or _objects_pointed_to(store, wanted)
        for found, relative in objects.items():
            # Names of objects are foreign input: `..` would write outside of the temporary folder.
            if {"..", ""} & {*relative.split("/")}:
                raise UnsafeCheckpointError(
                    f"{address!r} has an object {found!r:.200}, outside its folder. None is read."
                )
        places = [(folder if _RANK in name else file) / relative for relative in objects.values()]
        with ThreadPoolExecutor(jobs) as pool:
            # `list` raises the error of a failed download.
            list(pool.map(lambda found, place: get_file(found, place, store, progress_bar=False), objects, places))
        if not objects:
            if _RANK in name:
                raise NoCheckpointError(f"there are no files {address!r}, with numbers for {_RANK}. Check the address.")
            get_file(wanted, file, store, progress_bar=False)
    return os.fspath(file)


def _objects_pointed_to(store: ObjectStore, wanted: str) -> dict[str, str]:
    """Return the objects in the folder that a pointer names, such as `latest-rank0.pt` of a sharded run."""
    try:
        pointer = wanted if wanted.endswith(_SYMLINK) else f"{wanted}{_SYMLINK}"
        target = extract_path_from_symlink(pointer, store).rstrip("/")
    except FileNotFoundError:
        return {}
    return _objects(store, target, posixpath.basename(target))


def _objects(store: ObjectStore, wanted: str, name: str) -> dict[str, str]:
    """Return the objects of all ranks, or those in a folder, with their relative paths."""
    prefix = wanted.removesuffix(name) if _RANK in name else f"{wanted}/"
    below = {found: found.removeprefix(prefix) for found in store.list_objects(prefix) if found.startswith(prefix)}
    # Some stores list an object for the folder itself, or for its subfolders.
    below = {found: relative for found, relative in below.items() if relative and not relative.endswith("/")}
    if _RANK not in name:
        return below
    pattern = re.compile(re.escape(name).replace(re.escape(_RANK), "[0-9]+"))
    return {found: relative for found, relative in below.items() if pattern.fullmatch(relative)}


def latest(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt latest`."""
    # Without verification every checkpoint is accepted: an incomplete one has no final name.
    found = find_newest(folder_of(options.folder), verify=(lambda _: None) if options.no_verify else None)
    if found is None:
        raise NoCheckpointError(
            f"there is no whole checkpoint in {options.folder}. `composer-ckpt verify` reports what is wrong with one."
        )
    time: Any = found.info.get("timestamp") or {}
    data = {
        "folder": options.folder,
        "path": os.fspath(found.path),
        "timestamp": dict(time.get("Timestamp", time)),
        "skipped": [{"path": os.fspath(skip.path), "reason": skip.reason} for skip in found.skipped],
    }
    return Result(os.fspath(found.path), data)


def folder_of(typed: str) -> Path:
    """Return the folder given on the command line, which must be a local one."""
    if is_uri(typed):
        raise UsageError(
            f"FOLDER={typed!r} is in a store, where the object latest-rank0.pt.symlink names the newest. Name a folder "
            f"of this machine."
        )
    if not os.path.isdir(typed):
        raise UsageError(f"FOLDER={typed!r} is not a folder. Name the one that a run saves to.")
    return Path(typed)
