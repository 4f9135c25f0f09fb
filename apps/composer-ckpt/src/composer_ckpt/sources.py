"""Opening what a command was given, here or in a store."""

import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch

from composer_checkpoint import NoCheckpointError, UnsafeCheckpointError, load_file, verify_file
from composer_checkpoint import verify as verify_checkpoint
from composer_checkpoint.inspection import Kind, follow_pointers
from composer_checkpoint.remote.fetch import (
    extract_path_from_symlink,
    get_file,
    is_uri,
    maybe_create_object_store_from_uri,
    parse_uri,
)
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.stores.opening import reach
from composer_checkpoint.tensors import TensorSource, as_stored, find_kind, open_checkpoint
from composer_ckpt.outcomes import UsageError

__all__ = ["Accept", "fetched", "find_files", "kind_of", "opened", "place_of", "reaching_stores", "verify_hashes"]

_RANK = "{rank}"
_SYMLINK = ".symlink"
_JOBS = 4
Accept = Callable[[str], object]


@contextmanager
def opened(
    path: str,
    kind: str = "auto",
    *,
    tmp_dir: str | None = None,
    jobs: int = _JOBS,
    verify: bool = False,
    trust: bool = False,
    accept: Accept | None = None,
    **options: Any,
) -> Iterator[TensorSource]:
    """Open a checkpoint, here or in a store.

    Args:
        path: As it was typed.
        kind: What it is, `'auto'` to find out.
        tmp_dir: Where what is fetched lies meanwhile.
        jobs: How many files are fetched at a time.
        verify: Whether to compare it with its hashes first, as far as it has any.
        trust: Whether a file that asks for more than data is loaded all the same, into memory, by running it.
        accept: Called with what it is, before any of it is read; raises if that does not fit other arguments.
        **options: Of `open_checkpoint`.

    Raises:
        UsageError: If nothing is there that is known as a checkpoint.
        CorruptCheckpointError: If it is not what was written.
        UnsafeCheckpointError: If it asks for more than data, and is not trusted.
    """
    with fetched(path, tmp_dir, jobs) as local:
        found = kind_of(local) if kind == "auto" else cast(Kind, kind)
        if accept is not None:
            accept(found)
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
    """Yield where a checkpoint lies on this machine; what is in a store is fetched for as long as it is used."""
    if not path:
        raise UsageError("SRC='' is no path. Name a checkpoint.")
    if not is_uri(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="composer-ckpt-", dir=tmp_dir) as folder:
        with reaching_stores(path):
            local = _fetch(path, Path(folder), jobs)
        yield local


@contextmanager
def reaching_stores(address: str) -> Iterator[None]:
    """Raise a `UsageError` where an address turns out to be of no store."""
    try:
        yield
    except NotImplementedError as error:
        raise UsageError(
            f"{address!r} cannot be read: there is no store for {parse_uri(address).backend}:// addresses. Use s3, gs, "
            f"oci, azure, sftp, hf, dbfs, or another scheme that fsspec knows; of the web, name a file with its ending."
        ) from error


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


def kind_of(local: str) -> Kind:
    """Return the kind of the checkpoint that a path leads to.

    Raises:
        UsageError: If there is none.
    """
    try:
        return find_kind(follow_pointers(local))
    except NoCheckpointError as error:
        raise UsageError(str(error)) from error


def _load_trusted(place: Path) -> TensorSource:
    """Load all of a file, whatever it runs, in the form of one that is read tensor by tensor."""
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
    """Fetch a file, the files of all ranks, or all of a folder, and return where it lies."""
    wanted = parse_uri(address).path.rstrip("/")
    name = posixpath.basename(wanted)
    file = folder / (name.removesuffix(_SYMLINK) or "checkpoint")
    if "." in name and _RANK not in name:
        with suppress(FileNotFoundError):  # then it is a folder with a dot in its name
            get_file(address, file, progress_bar=False)
            return os.fspath(file)
    store = maybe_create_object_store_from_uri(address)
    if store is None:
        raise UsageError(f"SRC={address!r} is no address. Check it.")
    reach(store, address)
    with store:
        objects = _objects(store, wanted, name) or _objects_pointed_to(store, wanted)
        for found, relative in objects.items():
            if {"..", ""} & {*relative.split("/")}:
                raise UnsafeCheckpointError(
                    f"{address!r} has an object {found!r:.200}, outside its folder. None is read."
                )
        places = [(folder if _RANK in name else file) / relative for relative in objects.values()]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda found, place: get_file(found, place, store, progress_bar=False), objects, places))
        if not objects:
            if _RANK in name:
                raise NoCheckpointError(f"there are no files {address!r}, with numbers for {_RANK}. Check the address.")
            get_file(wanted, file, store, progress_bar=False)
    return os.fspath(file)


def _objects_pointed_to(store: ObjectStore, wanted: str) -> dict[str, str]:
    """Return the objects below the folder that a pointer names, such as `latest-rank0.pt` of a sharded run."""
    try:
        pointer = wanted if wanted.endswith(_SYMLINK) else f"{wanted}{_SYMLINK}"
        target = extract_path_from_symlink(pointer, store).rstrip("/")
    except FileNotFoundError:
        return {}
    return _objects(store, target, posixpath.basename(target))


def _objects(store: ObjectStore, wanted: str, name: str) -> dict[str, str]:
    """Return the objects of all ranks, or those below a folder, with their paths in it."""
    prefix = wanted.removesuffix(name) if _RANK in name else f"{wanted}/"
    below = {found: found.removeprefix(prefix) for found in store.list_objects(prefix) if found.startswith(prefix)}
    below = {found: relative for found, relative in below.items() if relative and not relative.endswith("/")}
    if _RANK not in name:
        return below
    pattern = re.compile(re.escape(name).replace(re.escape(_RANK), "[0-9]+"))
    return {found: relative for found, relative in below.items() if pattern.fullmatch(relative)}
