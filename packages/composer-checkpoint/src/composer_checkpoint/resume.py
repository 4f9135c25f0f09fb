"""Search for the newest complete checkpoint of a run, on disk and in stores, with the same result on all ranks."""

import glob
import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from logging import DEBUG, WARNING, getLogger
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from composer_checkpoint._compatibility import shared_check
from composer_checkpoint._ranks import Ranks, fetch_together, of_first_rank_of_node
from composer_checkpoint.checkpoint_uploads import within_folder
from composer_checkpoint.commit import read_pointer
from composer_checkpoint.errors import (
    CheckpointConflictError,
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NewerCheckpointError,
    NoCheckpointError,
    StorageError,
)
from composer_checkpoint.files import read_manifest
from composer_checkpoint.formats.archives import STATES_NAME, unpack
from composer_checkpoint.formats.per_rank import SAVE_ID_KEY, refuse_mixed_saves
from composer_checkpoint.inspection import inspect_file
from composer_checkpoint.lock import complete_interrupted_sets
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.names import format_name_with_dist, is_tar, partial_format
from composer_checkpoint.remote.fetch import extract_path_from_symlink, get_file
from composer_checkpoint.remote.publish import SYMLINK_SUFFIX
from composer_checkpoint.save_folder import (
    WITHOUT_MANIFEST,
    is_of_other_lineage,
    literal_prefix,
    look_through,
    numbers_in_name,
    told_abandoned,
)
from composer_checkpoint.sharded._storage import fetch_once_per_node, open_source
from composer_checkpoint.sharded.reader import read_manifest as read_sharded_manifest
from composer_checkpoint.state import Layout, check_spread, layout_of, own_file
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.stores.opening import list_if_allowed
from composer_checkpoint.verify import verify
from composer_dist import dist

if TYPE_CHECKING:
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events import Logger, State

__all__ = ["checkpoint_to_resume", "download_checkpoint"]

log = getLogger(__name__)

_MAX_NAMES = 10
_ORDER = ("batch", "sample", "token", "epoch")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible checkpoint: the index of its store, and its name there, with `{rank}` for per-rank files.

    `latest` is the target of the store's pointer if this checkpoint is later than the target.
    """

    store: int
    name: str
    latest: str | None = None


@contextmanager
def fetched_from_stores(
    saver: "CheckpointSaver", state: "State", logger: "Logger", layout: Layout, unusable: Sequence[str] = ()
) -> Iterator[str | None]:
    """Yield the path of the newest complete checkpoint in the loggers' or saver's stores. Every rank must call this.

    Each rank downloads what it needs of a candidate, once per node, and verifies its hashes. If they do not match on
    any rank, all ranks log the reason and try the next candidate. One that is later than the target of the pointer is
    skipped if it is of another lineage.
    """
    stores = _stores(saver, logger)
    candidates = Ranks().from_first(lambda: list(_candidates(stores, saver, state, layout)))
    unusable = list(unusable)
    for candidate in candidates:
        store = stores[candidate.store]
        with ExitStack() as fetched:
            path = _fetch(store, candidate.name, state, layout, fetched, unusable)
            if path is None:
                continue
            reason = Ranks().from_first(partial(_abandoned, candidate, path, store, layout))
            if reason is not None:
                log.warning("Skipped %s: %s", candidate.name, reason)
                continue
            log.info("Resuming from %s, which was downloaded.", candidate.name)
            yield path
            return
    # Starting from scratch would replace the run's checkpoints, so the user must decide.
    if unusable:
        raise CheckpointConflictError(
            f"autoresume found {len(unusable)} checkpoints, and none that this run could resume from: "
            f"{'; '.join(unusable[:_MAX_NAMES])}. Name one with load_path and without autoresume, or start over, "
            f"either with save_overwrite=True, which lets them be replaced, or in another save_folder."
        )
    yield None


def refuse_what_does_not_resume(manifest: Manifest | None, path: str, name: str) -> None:
    """Raise if a complete checkpoint cannot be resumed from."""
    if manifest is not None and manifest.info.get("weights_only"):
        raise IncompatibleCheckpointError(f"{name} holds the weights only, from which a run cannot resume.")
    if manifest is None and os.path.isfile(path) and "state" not in inspect_file(path).keys:
        raise IncompatibleCheckpointError(f"{name} has no 'state', so it is not a checkpoint of a training run.")


def shared_name(name: str, template: str, run_name: str | None) -> str:
    """Return the name that per-rank files share, with `{rank}` in it, from the name of any of them."""
    numbers = numbers_in_name(name, template)
    numbers.pop("rank", None)
    return partial_format(template, run_name=run_name, **numbers)


def _stores(saver: "CheckpointSaver", logger: "Logger") -> list[Any]:
    """Return the possible stores of the run's files: `ObjectStore`s, and logger destinations that can download."""
    if saver.latest_remote_file_name is None:
        return []
    keepers = [place for place in getattr(logger, "destinations", ()) if place.can_upload_files()]
    # The store itself where names agree, since unlike a logger destination it can be listed.
    keepers = [place if _store_of(place) is None else _store_of(place) for place in keepers]
    return keepers if saver.remote_uploader is None else [*keepers, saver.remote_uploader.remote_backend]


def _store_of(place: Any) -> ObjectStore | None:
    if not getattr(place, "keeps_names", True):
        return None
    backend = getattr(place, "remote_backend", None)
    return backend if isinstance(backend, ObjectStore) else None


def _remote_template(saver: "CheckpointSaver", state: "State", layout: Layout) -> str | None:
    if saver.remote_file_name is None:
        return None
    template = within_folder(state, saver.remote_file_name.filename).lstrip("/")
    template = partial_format(template, run_name=state.run_name)
    return partial_format(template, rank=0, local_rank=0, node_rank=0) if layout is Layout.MONOLITHIC else template


def _candidates(stores: list[Any], saver: "CheckpointSaver", state: "State", layout: Layout) -> Iterator[_Candidate]:
    """Yield the candidates of each store, newest first; one that only a pointer names comes last."""
    assert saver.latest_remote_file_name is not None
    pointer, template = saver.latest_remote_file_name.format(state), _remote_template(saver, state, layout)
    for index, store in enumerate(stores):
        pointed = _pointed_to(store, pointer)
        if template is None:
            yield _Candidate(index, pointed or pointer)
            continue
        times = _times_in(store, template, pointed, layout)
        names = sorted(times, key=times.__getitem__, reverse=True)
        num_later = sum(times[name] > times[pointed] for name in names) if pointed in times else 0
        # The pointer's target must come right after the later names, which are compared with it.
        names = [*names[:num_later], *[str(pointed)] * bool(num_later), *names[num_later:]]
        if layout is Layout.LOCAL:
            names = [shared_name(name, template, state.run_name) for name in names]
        elif pointed is not None or layout is Layout.MONOLITHIC:
            names.append(pointed or pointer)
        later = set(names[:num_later])
        for name in dict.fromkeys(names):  # per-rank files share a name, and the target may be listed twice
            yield _Candidate(index, name, names[num_later] if name in later else None)


def _times_in(store: Any, template: str, pointed: str | None, layout: Layout) -> dict[str, list[int]]:
    names = {name for name in (pointed,) if name is not None}  # the listing may be outdated
    if isinstance(store, ObjectStore):
        objects = list_if_allowed(store, literal_prefix(template))
        # Also folders of unfinished saves, so that skipping them is logged.
        names.update(map(posixpath.dirname, objects) if layout is Layout.SHARDED else objects)
    found = {name: numbers for name in names if (numbers := numbers_in_name(name, template))}
    return {name: [numbers.get(unit, 0) for unit in _ORDER] for name, numbers in found.items()}


def _pointed_to(store: Any, pointer: str) -> str | None:
    try:
        return extract_path_from_symlink(pointer + SYMLINK_SUFFIX, store)
    except (FileNotFoundError, NotImplementedError):
        return None
    except CheckpointError as error:
        log.warning("Skipped %s: %s", pointer + SYMLINK_SUFFIX, error)
        return None


def _fetch(
    store: Any, name: str, state: "State", layout: Layout, fetched: ExitStack, unusable: list[str]
) -> str | None:
    """Return the path of a checkpoint that is complete on every rank, or `None`. Every rank must call this.

    An existing checkpoint that cannot be used is added to `unusable`; an unfinished one is not.
    """
    with ExitStack() as attempt:
        if layout is Layout.SHARDED:
            path, error = _fetch_folder(store, name, state, attempt)
        else:
            path, error = _fetch_file(store, name, layout, attempt)
        is_unfinished = isinstance(error, NoCheckpointError)
        # Not even a part of it exists.
        is_absent = isinstance(error, FileNotFoundError | NotImplementedError) and not is_unfinished
        told = None if error is None else (is_absent, is_unfinished, str(error))
        problems = dist.all_gather_object(told)  # all ranks accept or skip the candidate together
        if not any(problems):
            fetched.push(attempt.pop_all())  # keeps the download until the caller has loaded it
            return path
    # Logged on all ranks, since each has its own log.
    for rank, problem in enumerate(problems):
        if problem is not None:
            is_absent, is_unfinished, reason = problem
            log.log(DEBUG if is_absent else WARNING, "Skipped %s: %s (on rank %d)", name, reason, rank)
            if not is_absent and not is_unfinished:
                unusable.append(f"{name} ({reason})")
            break
    return None


def _abandoned(candidate: _Candidate, path: str, store: Any, layout: Layout) -> str | None:
    """Return the reason if a downloaded checkpoint belongs to an abandoned run, or `None`.

    If the pointer's target is damaged, later checkpoints are accepted.
    """
    if candidate.latest is None:
        return None
    try:
        latest = _manifest_in(store, candidate.latest, layout)
    except (CheckpointError, FileNotFoundError, NotImplementedError) as error:
        _raise_if_whole(error)
        return None
    if layout is Layout.SHARDED:
        own = read_sharded_manifest(open_source(path, {}))
    else:
        own = read_manifest(own_file(path))
    if latest is None:
        return None
    if own is None:
        return WITHOUT_MANIFEST
    return told_abandoned(candidate.latest) if is_of_other_lineage(own.info, latest.info) else None


def _manifest_in(store: Any, name: str, layout: Layout) -> Manifest | None:
    with tempfile.TemporaryDirectory(prefix="composer-resume-") as folder:
        if layout is Layout.SHARDED:
            place = os.path.join(folder, MANIFEST_NAME)
            store.download_object(f"{name}/{MANIFEST_NAME}", place)
            with open(place, "rb") as file:
                return Manifest.from_json(file.read())
        name = own_file(name)
        place = os.path.join(folder, posixpath.basename(name))
        get_file(name, place, store, overwrite=True, progress_bar=False)
        return read_manifest(place)


def _fetch_file(store: Any, name: str, layout: Layout, attempt: ExitStack) -> tuple[str, Exception | None]:
    own = attempt.enter_context(tempfile.TemporaryDirectory(prefix="composer-resume-"))
    fetches = layout is Layout.LOCAL or dist.get_local_rank() == 0
    if layout is not Layout.LOCAL:  # the ranks of a node share the folder of the one that downloads
        own = of_first_rank_of_node(own)
        # The rank that downloaded must not delete the file before the others have read it. After an exception, other
        # ranks may not reach the barrier.
        attempt.push(lambda kind, *_: dist.barrier() if kind is None else None)
    base = os.path.basename(name)
    # The rank may be in the name of a folder only, and the downloads of all ranks need different names.
    if layout is Layout.LOCAL and "{rank}" not in base:
        base = f"{{rank}}-{base}"
    path = os.path.join(own, base)

    def fetch() -> tuple[object, Exception | None]:
        try:
            return _save_id_of(_fetch_and_check(store, name, path)) if fetches else None, None
        except (CheckpointError, FileNotFoundError, NotImplementedError) as error:
            _raise_if_whole(error)
            return None, error

    save_id, problem = Ranks().together(fetch)
    if layout is Layout.LOCAL:
        gathered = dist.all_gather_object((problem is None, save_id))
        try:
            refuse_mixed_saves([found for is_here, found in gathered if is_here], name)
        except CorruptCheckpointError as error:
            problem = problem or error
    return path, problem


def _save_id_of(manifest: Manifest | None) -> object:
    return None if manifest is None else manifest.info.get(SAVE_ID_KEY)


def _fetch_and_check(store: Any, name: str, path: str) -> Manifest | None:
    here = own_file(path)
    try:
        get_file(own_file(name), here, store, overwrite=True, progress_bar=False)
    except FileNotFoundError as error:
        if "{rank}" not in name:
            raise
        # Unfinished instead of absent, since other ranks may have files of this save.
        raise NoCheckpointError(f"there is no file of rank {dist.get_global_rank()}: {error}") from error
    return _verified(here, name)


def _verified(path: str, name: str) -> Manifest | None:
    """Verify a checkpoint, refuse it if a run cannot resume from it, and return its manifest."""
    manifest = verify(path)
    refuse_what_does_not_resume(manifest, path, name)
    return manifest


def _raise_if_whole(error: Exception) -> None:
    """Raise an error that does not make the checkpoint invalid, since resuming from an older one would lose work."""
    if isinstance(error, StorageError | NewerCheckpointError):
        raise error


def _fetch_folder(store: Any, name: str, state: "State", attempt: ExitStack) -> tuple[str, Exception | None]:
    if not isinstance(store, ObjectStore):
        return "", NotImplementedError(f"{type(store).__name__} has no folders.")
    address = attempt.enter_context(fetch_once_per_node(store, name))
    try:
        # Each step fails on all ranks or on none, so that all ranks take part in the next one.
        Ranks().together(
            lambda: refuse_what_does_not_resume(read_sharded_manifest(open_source(address, {})), address, name)
        )
        check_spread(address, state)
    except CheckpointError as error:
        _raise_if_whole(error)
        return address, error
    return address, None


@contextmanager
def checkpoint_to_resume(saver: "CheckpointSaver", state: "State", logger: "Logger") -> Iterator[str | None]:
    """Yield the path of the newest complete checkpoint of a saver, or `None`.

    The saver's folder is searched first, then the loggers that keep files, then the saver's store. The link to the
    latest checkpoint is not followed blindly, since its target may be damaged or outdated. However, later checkpoints
    of an abandoned run, from which a user went back to the target of the link, are skipped. Skipped checkpoints are
    logged with the reason; those in stores on every rank. Every rank must call this.

    Args:
        saver: The saver of the resumed run. Its names define the search, and its `resumes` is set.
        state: The training state, not changed.
        logger: Has the destinations that keep files.

    Yields:
        The path for `load_checkpoint`. For a sharded checkpoint in a store it is the address; each rank has downloaded
        what it needs. Downloads are deleted on exit.

    Raises:
        RuntimeError: If rank 0 has found a checkpoint that other ranks cannot see.
        CheckpointConflictError: If there are checkpoints and none can be used: a run that starts from scratch would
            replace them.
        NewerCheckpointError: If the newest is of a newer format.
        StorageError: If a disk or store fails or denies access.
    """
    layout = layout_of(state)
    # The ranks might see different files, so all of them use the result of rank 0.
    path, unusable = Ranks().exchange(
        lambda: _search_together(saver, state, layout), lambda found: found[:1] * len(found)
    )
    saver.resumes = path is not None
    if path is not None:
        own = own_file(path) if layout is Layout.LOCAL else path
        missing = [rank for rank, sees in enumerate(dist.all_gather_object(os.path.exists(own))) if not sees]
        if missing:
            raise RuntimeError(
                f"autoresume found {path} on rank 0, and ranks {missing} do not see it. Save to a disk that all nodes "
                f"share, or to a store."
            )
        log.info("Resuming from %s.", path)
        yield path
        return
    with fetched_from_stores(saver, state, logger, layout, unusable) as path:
        saver.resumes = path is not None
        yield path


def _search_together(saver: "CheckpointSaver", state: "State", layout: Layout) -> tuple[str | None, list[str]]:
    """Search the folder on rank 0. For per-rank files each rank checks its own."""
    if layout is not Layout.LOCAL:
        # Only one rank verifies, since verification reads every byte of a file.
        return _search(saver, state, os.fspath, lambda path: [_verified(path, path)]) if _is_first() else (None, [])

    def with_rank(path: Path) -> str:
        template = os.path.abspath(saver.filename.format(state, keep_placeholders=True))
        return "/" + shared_name(os.path.abspath(path).lstrip("/"), template.lstrip("/"), state.run_name)

    with shared_check(_check_own) as check_each:
        if not _is_first():
            return None, []
        folder = format_name_with_dist(saver.folder, state.run_name)
        if os.path.isdir(folder):
            # A save that was killed while renaming would look like files of several saves.
            complete_interrupted_sets(folder)
        return _search(saver, state, with_rank, check_each)


def _is_first() -> bool:
    return dist.get_global_rank() == 0


def _search(
    saver: "CheckpointSaver",
    state: "State",
    name_of: Callable[[Path], str],
    check_each: Callable[[str], "list[Manifest | None]"],
) -> tuple[str | None, list[str]]:
    """Return the newest checkpoint in the folder, and the unusable ones with the reasons.

    `name_of` returns the path that the ranks share, with `{rank}` in it for per-rank files.
    """
    folder = format_name_with_dist(saver.folder, state.run_name)

    def verify_each(path: Path) -> None:
        refuse_mixed_saves([_save_id_of(manifest) for manifest in check_each(name_of(path))], path)

    _refuse_unreadable(folder)  # `glob` does not raise, so an unreadable folder would look empty
    target = None if saver.latest_filename is None else read_pointer(saver.latest_filename.format(state))
    latest = target if target is not None and target.exists() else None
    pattern = os.path.join(glob.escape(folder), _as_glob(within_folder(state, saver.filename.filename), state))
    newest, skipped = look_through(pattern, verify=verify_each, latest=latest)
    if newest is None and latest is not None and latest not in [skip.path for skip in skipped]:
        # The link may lead to a checkpoint that was saved under another `save_filename`.
        newest, others = look_through(
            glob.escape(os.fspath(latest)), verify=lambda path: _verified(os.fspath(path), os.fspath(path))
        )
        skipped += others
    unusable = [f"{skip.path} ({skip.reason})" for skip in skipped if skip.path.exists()]  # without dangling links
    return (None if newest is None else name_of(newest.path)), unusable


def _refuse_unreadable(folder: str) -> None:
    """Raise if a folder cannot be listed, so that its checkpoints are unknown."""
    try:
        os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise StorageError(
            error.errno,
            f"save_folder={folder!r} cannot be looked through for checkpoints: {error.strerror or error}. Check the "
            f"disk and the permissions, or choose another folder",
        ) from error


def _check_own(path: str) -> "Manifest | None":
    own, of_first = own_file(path), path.replace("{rank}", "0")
    if not os.path.exists(own) and os.path.exists(of_first):
        # If fewer ranks saved, this rank's file was never written; the error must name that, not a missing file.
        manifest = read_manifest(of_first)
        saved_by = None if manifest is None else manifest.info.get("world_size")
        if isinstance(saved_by, int) and saved_by < dist.get_world_size():
            raise IncompatibleCheckpointError(
                f"{saved_by} ranks saved these files, and {dist.get_world_size()} look for theirs: per-rank files are "
                f"not elastic. Start {saved_by} ranks, or put the files together with "
                f"composer_checkpoint.formats.per_rank.merge_local"
            )
    return _verified(own, own)


def _as_glob(template: str, state: "State") -> str:
    parts: list[str] = []
    for literal, name, _, _ in Formatter().parse(template):
        parts.append(glob.escape(literal))
        if name is None:
            continue
        known = partial_format(f"{{{name}}}", run_name=state.run_name, rank=0, local_rank=0, node_rank=0)
        # Numbers of the time stay open; the rank is 0, so that per-rank files match once.
        parts.append("*" if known.startswith("{") else glob.escape(known))
    return "".join(parts)


def download_checkpoint(
    path: str | os.PathLike[str],
    node_checkpoint_folder: str | os.PathLike[str],
    object_store: Any = None,
    progress_bar: bool = True,
    fsdp_sharded_state_dict_enabled: bool = False,
) -> tuple[str, str | None, bool]:
    """Download a checkpoint of one file to this node, and unpack it if it is a tar archive. Every rank must call this.

    The first rank of each node downloads for the others.

    Args:
        path: A local path, an address, or with `object_store` the name of an object. `{rank}`, `{local_rank}` and
            `{node_rank}` are filled in with 0.
        node_checkpoint_folder: The destination, the same folder for all ranks of a node.
        object_store: Holds `path`: an `ObjectStore`, or a logger destination that can download.
        progress_bar: Whether to show the progress.
        fsdp_sharded_state_dict_enabled: Whether each rank downloads its own file, whose name contains its rank.

    Returns:
        The file for `safe_torch_load`; the folder into which it was unpacked, or `None` if it was not an archive; and
        whether this rank unpacked its own file although it is not rank 0.

    Raises:
        FileNotFoundError: On all ranks, if the checkpoint does not exist.
        CheckpointError: On all ranks, if an archive is damaged or has members that lead out of it.
    """
    rank = dist.get_global_rank() if fsdp_sharded_state_dict_enabled else 0
    places = (dist.get_local_rank(), dist.get_node_rank()) if fsdp_sharded_state_dict_enabled else (0, 0)
    source = partial_format(os.fspath(path), rank=rank, local_rank=places[0], node_rank=places[1])
    name = os.path.basename(source).removesuffix(".symlink")
    local = Path(node_checkpoint_folder) / f"rank{rank}_{name}"
    unpacked = Path(node_checkpoint_folder) / f"rank{rank}" if is_tar(name) else None
    states = local if unpacked is None else unpacked / STATES_NAME
    fetches = fsdp_sharded_state_dict_enabled or dist.get_local_rank() == 0

    def fetch() -> None:
        get_file(source, local, object_store, overwrite=True, progress_bar=progress_bar)
        if unpacked is not None:
            unpacked.mkdir(parents=True, exist_ok=True)
            unpack(os.fspath(local), name, states)

    fetch_together(fetch if fetches else lambda: None)
    return os.fspath(states), unpacked and os.fspath(unpacked), unpacked is not None and rank > 0
