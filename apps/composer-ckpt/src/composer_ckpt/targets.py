"""Checks of a command's target before anything is read, and uploads to object stores."""

import argparse
import os
import posixpath
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from composer_checkpoint import CheckpointConflictError, NoCheckpointError, RemoteUploader
from composer_checkpoint.commit import is_of_checkpoint, refuse_existing, remove_leftovers_of
from composer_checkpoint.remote.fetch import is_uri, maybe_create_object_store_from_uri, parse_uri
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.tensors import find_kind
from composer_ckpt.output import UsageError, counted

__all__ = ["refuse_for_source", "refuse_for_target", "clear_leftovers", "may_replace", "written_to"]

_RANK = "{rank}"
# Files by which readers recognize a checkpoint: deleted first and uploaded last, so that no partial one is recognized.
_MARKS = frozenset({"config.json", "adapter_config.json", ".metadata", "composer_manifest.json"})
# Extensions that commands write only for checkpoints, and those of compressed checkpoints.
_BY_ENDING = (".safetensors", ".json", ".gz", ".bz2", ".xz", ".lzma", ".lz4", ".lzo", ".zst")
_ZIP = b"PK\x03\x04"
_LEGACY_PT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # files of torch.save before 1.6


def may_replace(
    target: str, sources: Iterable[str | None], *, overwrite: bool, is_folder: bool, world_size: int | None = None
) -> bool:
    """Return the `overwrite` flag for a target, which must be absent, empty or a replaceable checkpoint.

    Args:
        target: As given on the command line; a local path, possibly with `{rank}` in its name.
        sources: Paths or URIs to be read, as given on the command line.
        overwrite: Whether `--overwrite` was given.
        is_folder: Whether a folder is written.
        world_size: Number of ranks of per-rank files.

    Raises:
        UsageError: If the target is a source, or a folder that contains one or the current folder.
        CheckpointConflictError: If the target exists and must not be replaced.
    """
    if not target:
        raise UsageError("DST='' is no path. Name what is to be written.")
    if _RANK in target:
        if any(source and os.path.realpath(source) == os.path.realpath(target) for source in sources):
            raise UsageError(f"DST={target!r} is what is read. Choose another name.")
        for rank in range(world_size or 0):
            refuse_existing(Path(os.path.abspath(target.replace(_RANK, str(rank)))), overwrite)
        return overwrite
    final = Path(os.path.realpath(target))  # links must not hide that source and target are the same
    for source in sources:
        read = None if not source or is_uri(source) else Path(os.path.realpath(source))
        if read is not None and (read == final or final in read.parents):
            raise UsageError(f"DST={target!r} is {source!r}, which is read, or has it in it. Choose another name.")
    here = Path.cwd()
    if final == here or final in here.parents:
        raise UsageError(f"DST={target!r} has the current folder in it, which stays. Name a folder of its own.")
    if not os.path.lexists(target) or (is_folder and _is_empty(final)):
        return overwrite or os.path.lexists(target)
    if not overwrite:
        raise CheckpointConflictError(f"{target} exists. Choose another name, or give --overwrite to replace it.")
    _refuse_what_is_no_checkpoint(target, final, is_folder=is_folder)
    return True


def clear_leftovers(target: str, world_size: int | None = None) -> None:
    """Delete the unfinished files that killed commands left next to a target.

    Args:
        target: A local path, possibly with `{rank}` in its name.
        world_size: Number of ranks of per-rank files.
    """
    for rank in range(world_size or 1) if _RANK in target else (0,):
        remove_leftovers_of(target.replace(_RANK, str(rank)))


@contextmanager
def written_to(
    target: str,
    *,
    overwrite: bool,
    is_folder: bool,
    tmp_dir: str | None = None,
    jobs: int = 4,
    dry_run: bool = False,
) -> Iterator[str]:
    """Yield the path to write to: a local target itself, or a temporary path that is then uploaded.

    The files by which readers recognize a checkpoint are uploaded last, after all others have arrived.

    Args:
        target: As given on the command line.
        overwrite: Whether to replace existing objects. Weights of the older checkpoint are then deleted.
        is_folder: Whether a folder is written.
        tmp_dir: Folder for the files before their upload.
        jobs: Number of concurrent uploads.
        dry_run: Whether to write nothing.

    Raises:
        CheckpointConflictError: If the target exists and must not be replaced.
        UsageError: If no object store has the scheme of the URI.
    """
    if not is_uri(target):
        yield target
        return
    place = parse_uri(target).path.rstrip("/")
    if not place:
        raise UsageError(f"DST={target!r} is all of a store. Name a folder or a file in it.")
    try:
        store = maybe_create_object_store_from_uri(target)
    except NotImplementedError as error:
        raise UsageError(f"DST={target!r}: {error}") from error
    assert store is not None  # only local paths have no store
    with store:
        older = _older(store, place, is_folder=is_folder)
        if older and not overwrite and not dry_run:
            raise CheckpointConflictError(
                f"{target} exists, with {counted(len(older), 'object')}. Choose another name, or "
                f"give --overwrite to replace it."
            )
        with tempfile.TemporaryDirectory(prefix="composer-ckpt-", dir=tmp_dir) as folder:
            local = Path(folder, posixpath.basename(place))
            yield os.fspath(local)
            if not dry_run:
                _upload(local, target, place, store, older, jobs)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _refuse_what_is_no_checkpoint(target: str, final: Path, *, is_folder: bool) -> None:
    """Raise if the target is something else than a checkpoint, or a folder that a file would replace."""
    if not final.is_dir():
        if not _looks_written_by_us(final):
            raise CheckpointConflictError(
                f"{target} is a file that is no checkpoint, and --overwrite replaces checkpoints. Choose another name, "
                f"or remove the file yourself."
            )
        return
    if not is_folder:
        raise CheckpointConflictError(f"{target} is a folder, and a file is written. Choose another name.")
    try:
        find_kind(final)
    except NoCheckpointError as error:
        some = ", ".join(sorted(os.listdir(final))[:5])
        raise CheckpointConflictError(
            f"{target} is a folder with {some}, which is no checkpoint, and --overwrite replaces checkpoints. Choose "
            f"another name, or remove the folder yourself."
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
    """Return the existing objects of the target."""
    if is_folder:
        return [name for name in store.list_objects(f"{place}/") if name.startswith(f"{place}/")]
    try:
        store.get_object_size(place)
    except FileNotFoundError:
        return []
    return [place]


def _upload(local: Path, target: str, place: str, store: ObjectStore, older: list[str], jobs: int) -> None:
    if local.is_dir():
        files = {posixpath.join(place, p.relative_to(local).as_posix()): p for p in local.rglob("*") if p.is_file()}
    else:
        files = {place: local}
    marks = {name: path for name, path in files.items() if path.name in _MARKS}
    below = {name: name.removeprefix(f"{place}/") for name in older}
    surplus = [name for name in older if name not in files and is_of_checkpoint(below[name])]
    if local.is_dir():
        # An old mark next to new weights would look like a complete checkpoint.
        for name in [*(name for name in older if below[name] in _MARKS), *surplus]:
            store.delete_object(name)
    uploader = RemoteUploader(target, num_concurrent_uploads=jobs)
    try:
        for group in ({name: path for name, path in files.items() if name not in marks}, marks):
            pending = [uploader.upload_file_async(name, path, True, copy=False) for name, path in sorted(group.items())]
            for upload in pending:
                upload.result()
    finally:
        uploader.wait_and_close()


_RUN_WHERE_TRUSTED = ("composer", "pt")
_WEIGHTS_ALONE = ("safetensors", "hf", "modular")  # formats of which only the model is read


def refuse_for_target(options: argparse.Namespace, target: str) -> None:
    """Raise if options for Hugging Face folders are given for another target.

    Args:
        options: Options of `convert` or `merge`.
        target: Format of the target.

    Raises:
        UsageError: If there are such options.
    """
    if target == "hf":
        return
    only_hf = {
        "--peft": options.peft != "auto",
        "--base-model": options.base_model is not None,
        "--format": options.format != "safetensors",
        "--max-shard-size": options.max_shard_size is not None,
        "--config": options.config is not None,
        "--config-override": options.config_override is not None,
        "--tokenizer": options.tokenizer is not None,
    }
    if given := [name for name, is_given in only_hf.items() if is_given]:
        raise _unfitting(given, "of Hugging Face folders", f"this writes {target}")


def refuse_for_source(options: argparse.Namespace, kind: str, target: str) -> None:
    """Raise if options for another kind of source are given.

    Args:
        options: Options of `convert` or `merge`.
        kind: Kind of the source.
        target: Format of the target.

    Raises:
        UsageError: If there are such options.
    """
    found = f"SRC={options.source!r} is {kind}"
    if options.trust and kind not in _RUN_WHERE_TRUSTED:
        raise _unfitting(["--trust"], "of .pt files", found)
    if options.deepspeed_weights != "fp32" and kind != "deepspeed":
        raise _unfitting(["--deepspeed-weights"], "of DeepSpeed's folders", found)
    if options.trust_remote_code and "hf" not in (kind, target):
        raise _unfitting(["--trust-remote-code"], "of Hugging Face folders", f"{found}, and this writes {target}")
    state = {"--optimizer": options.optimizer, "--resumption": options.resumption}
    if kind in _WEIGHTS_ALONE and (given := [name for name, is_given in state.items() if is_given]):
        raise _unfitting(given, "of what resumes a run", f"{found}, of which weights alone are read")


def _unfitting(names: Iterable[str], whose: str, found: str) -> UsageError:
    names = [*names]
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return UsageError(f"{', '.join(names)} {verb} {whose}, and {found}. Leave {them} out.")
