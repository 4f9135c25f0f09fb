"""Sources and targets of commands, on this machine, in object stores and on the Hub."""

import argparse
import filecmp
import os
import posixpath
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile, is_zipfile

import torch

from composer_checkpoint import (
    CheckpointConflictError,
    NoCheckpointError,
    UnsafeCheckpointError,
    find_newest,
    load_file,
    verify_file,
)
from composer_checkpoint import verify as verify_checkpoint
from composer_checkpoint.commit import is_of_checkpoint, refuse_existing
from composer_checkpoint.lock import remove_leftovers_of
from composer_checkpoint.remote.fetch import extract_path_from_symlink, get_file
from composer_checkpoint.remote.publish import publish_checkpoint
from composer_checkpoint.stores.base import ObjectStore, has_object, is_uri, parse_uri
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, reach
from composer_checkpoint.tensors import Kind, TensorSource, as_stored, find_kind, follow_pointers, open_checkpoint
from composer_ckpt.options import ConvertOptions
from composer_ckpt.output import MismatchError, Result, UsageError, counted, first_few

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
    assert store is not None  # only local paths have no store
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


# Files by which readers recognize a checkpoint, which are deleted before others are replaced.
_MARKS = frozenset({"config.json", "adapter_config.json", ".metadata", "composer_manifest.json"})
# Extensions that commands write only for checkpoints, and those of compressed checkpoints.
_BY_ENDING = (".safetensors", ".json", ".gz", ".bz2", ".xz", ".lzma", ".lz4", ".lzo", ".zst")
_ZIP = b"PK\x03\x04"
_LEGACY_PT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # files of torch.save before 1.6


def may_replace(
    target: str, sources: Iterable[str | None], *, overwrite: bool, is_folder: bool, world_size: int | None = None
) -> bool:
    """Return the `overwrite` flag for a local target, which must be absent, empty or a replaceable checkpoint."""
    final = Path(os.path.realpath(target))  # links must not hide that source and target are the same
    needed = [Path.cwd(), *(Path(os.path.realpath(source)) for source in sources if source and not is_uri(source))]
    if any(final in (place, *place.parents) for place in needed):
        raise UsageError(f"DST={target!r} is or contains a source or the current folder. Choose another name.")
    if _RANK in target:
        for rank in range(world_size or 0):
            refuse_existing(Path(os.path.abspath(target.replace(_RANK, str(rank)))), overwrite)
        return overwrite
    if not os.path.lexists(target):
        return overwrite
    if is_folder and final.is_dir() and not any(final.iterdir()):
        return True
    if not overwrite:
        raise CheckpointConflictError(f"{target} exists. Choose another name, or give --overwrite to replace it.")
    _refuse_what_is_no_checkpoint(target, final, is_folder=is_folder)
    return True


def clear_leftovers(target: str, world_size: int | None = None) -> None:
    """Delete the unfinished files that killed commands left next to a local target."""
    for rank in range(world_size or 1) if _RANK in target else (0,):
        remove_leftovers_of(target.replace(_RANK, str(rank)))


@contextmanager
def written_to(options: ConvertOptions) -> Iterator[str]:
    """Yield the path to write to: a local target itself, or a temporary path that is then uploaded.

    With `--overwrite`, weights of the older checkpoint are deleted.
    """
    target = options.target
    if not is_uri(target):
        yield target
        return
    place = parse_uri(target).path.rstrip("/")
    if not place:
        raise UsageError(f"DST={target!r} is a whole store. Name a folder or a file in it.")
    store = maybe_create_object_store_from_uri(target)
    assert store is not None  # only local paths have no store
    with store:
        older = _older(store, place, is_folder=options.is_folder)
        if older and not options.overwrite:
            raise CheckpointConflictError(
                f"{target} exists, with {counted(len(older), 'object')}. Choose another name, or "
                f"give --overwrite to replace it."
            )
        with tempfile.TemporaryDirectory(prefix="composer-ckpt-", dir=options.tmp_dir) as folder:
            local = Path(folder, posixpath.basename(place))
            yield os.fspath(local)
            if not options.dry_run:
                _upload(local, place, store, older, options.jobs)


def _refuse_what_is_no_checkpoint(target: str, final: Path, *, is_folder: bool) -> None:
    if not final.is_dir():
        if not _looks_written_by_us(final):
            raise CheckpointConflictError(
                f"{target} is a file that is not a checkpoint, and --overwrite replaces checkpoints. Choose another "
                f"name, or remove the file yourself."
            )
        return
    if not is_folder:
        raise CheckpointConflictError(f"{target} is a folder, and a file is written. Choose another name.")
    try:
        find_kind(final)
    except NoCheckpointError as error:
        raise CheckpointConflictError(
            f"{target} is a folder with {first_few(sorted(os.listdir(final)))}, which is not a checkpoint, and "
            f"--overwrite replaces checkpoints. Choose another name, or remove the folder yourself."
        ) from error


def _looks_written_by_us(file: Path) -> bool:
    """Return whether a file may have been written by a command, judged by its first bytes, even if it is damaged."""
    if not file.exists() or file.name.endswith(_BY_ENDING):  # `exists` is false for a dangling link
        return True
    if not file.is_file():  # reading a pipe would block
        return False
    with open(file, "rb") as opened:
        beginning = opened.read(len(_LEGACY_PT))
    if beginning.startswith(_ZIP) and is_zipfile(file):  # a truncated file is not a zip, and passes below
        with ZipFile(file) as archive:
            return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
    return not beginning or beginning.startswith((_ZIP, _LEGACY_PT))


def _older(store: ObjectStore, place: str, *, is_folder: bool) -> list[str]:
    if is_folder:
        return [name for name in store.list_objects(f"{place}/") if name.startswith(f"{place}/")]
    return [place] if has_object(store, place) else []


def _upload(local: Path, place: str, store: ObjectStore, older: list[str], jobs: int) -> None:
    if local.is_dir():
        written = {posixpath.join(place, path.relative_to(local).as_posix()) for path in local.rglob("*")}
        for name in older:
            below = name.removeprefix(f"{place}/")
            # An old mark next to new weights would look like a complete checkpoint.
            if below in _MARKS or (name not in written and is_of_checkpoint(below)):
                store.delete_object(name)
    publish_checkpoint(local, store, place, overwrite=True, num_concurrent_uploads=jobs)


def publish(folder: str, repo: str, options: ConvertOptions) -> str:
    """Upload a folder to a repository of the Hub in one commit, and return the commit's URL."""
    from huggingface_hub import HfApi, hf_hub_download  # slow to load, and rarely needed

    api = HfApi()
    # The upload replaces files, so an existing repository is accepted only with --overwrite. Without --private, the Hub
    # decides, since an organization may have a default of its own.
    repo = api.create_repo(repo, private=options.private or None, exist_ok=options.overwrite).repo_id
    commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Add a model that composer-ckpt wrote")
    if options.test_uploaded_model:
        with tempfile.TemporaryDirectory(prefix="composer-ckpt-", dir=options.tmp_dir) as place:
            names = [path.relative_to(folder).as_posix() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
            for name in names:
                hf_hub_download(repo, name, revision=commit.oid, local_dir=place)
            _, other, failed = filecmp.cmpfiles(folder, place, names, shallow=False)
        if other or failed:
            raise MismatchError(
                f"the Hub does not have the files that were sent to {repo}: {', '.join([*other, *failed][:5])}. The "
                f"local folder is complete. Check the repository, and upload it again."
            )
    return commit.commit_url
