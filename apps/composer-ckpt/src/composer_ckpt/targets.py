"""Targets of commands: checks before anything is read, and uploads to object stores and the Hub."""

import filecmp
import os
import posixpath
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from composer_checkpoint import CheckpointConflictError, NoCheckpointError
from composer_checkpoint.commit import is_of_checkpoint, refuse_existing, remove_leftovers_of
from composer_checkpoint.remote.fetch import is_uri, maybe_create_object_store_from_uri, parse_uri
from composer_checkpoint.remote.publish import publish_checkpoint
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.tensors import find_kind
from composer_ckpt.options import ConvertOptions
from composer_ckpt.output import MismatchError, UsageError, counted, first_few

_RANK = "{rank}"
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
        if older and not options.overwrite and not options.dry_run:
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
    try:
        store.get_object_size(place)
    except FileNotFoundError:
        return []
    return [place]


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
