"""Search for the newest complete checkpoint of a run, on disk and in stores, with the same result on all ranks."""

import glob
import os
import posixpath
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from logging import DEBUG, WARNING, getLogger
from pathlib import Path
from string import Formatter
from typing import Any

from composer_checkpoint._ranks import Ranks, fetch_together, of_first_rank_of_node
from composer_checkpoint.checkpoint_uploads import within_folder
from composer_checkpoint.commit import read_pointer
from composer_checkpoint.errors import (
    CheckpointConflictError,
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NoCheckpointError,
    StorageError,
)
from composer_checkpoint.files import read_manifest
from composer_checkpoint.formats.archives import STATES_NAME, unpack
from composer_checkpoint.inspection import inspect_file
from composer_checkpoint.lock import complete_interrupted_sets
from composer_checkpoint.manifest import MANIFEST_NAME, SAVE_ID_KEY, Manifest, refuse_mixed_saves
from composer_checkpoint.names import is_tar
from composer_checkpoint.remote.fetch import extract_path_from_symlink, get_file
from composer_checkpoint.remote.publish import SYMLINK_SUFFIX
from composer_checkpoint.save_folder import (
    LINEAGE_KEY,
    WITHOUT_MANIFEST,
    candidates_in,
    fault_of,
    literal_prefix,
    manifest_of,
    numbers_in_name,
)
from composer_checkpoint.saver import CheckpointSaver
from composer_checkpoint.sharded._storage import fetch_once_per_node, open_source
from composer_checkpoint.sharded.load import check_sharded
from composer_checkpoint.sharded.reader import read_manifest as read_sharded_manifest
from composer_checkpoint.state import Layout, empty_content, layout_of, other_number_of_ranks, own_file
from composer_checkpoint.stores.base import ObjectStore, read_object
from composer_checkpoint.stores.opening import list_if_allowed
from composer_checkpoint.verify import verify
from composer_dist import dist
from composer_events.formatting import format_name_with_dist, partial_format
from composer_events.logger import Logger
from composer_events.state import State

log = getLogger(__name__)

_MAX_NAMES = 10
_ORDER = ("batch", "sample", "token", "epoch")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible checkpoint: its path or its name in a store, with `{rank}` for per-rank files.

    `latest` is the target of the pointer if this checkpoint is later than the target.
    """

    name: str
    latest: str | None = None


@contextmanager
def checkpoint_to_resume(saver: CheckpointSaver, state: State, logger: Logger) -> Iterator[str | None]:
    """Yield the path of the newest complete checkpoint of a saver, or `None`.

    The saver's folder is searched first, then the loggers that keep files, then the saver's store. The link to the
    latest checkpoint is not followed blindly, since its target may be damaged or outdated. However, later checkpoints
    of an abandoned run, from which a user went back to the target of the link, are skipped. Skipped checkpoints are
    logged with the reason. Every rank must call this.

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
    layout, ranks, unusable = layout_of(state), Ranks(), list[str]()
    saver.resumes = False
    for store in (None, *_stores(saver, logger)):  # the folder first
        search = partial(_in_folder, saver, state, layout) if store is None else partial(_in_store, store, saver, state)
        # The ranks might see different files, so all of them use the result of rank 0.
        candidates, skipped = ranks.from_first(search)
        unusable += skipped
        for candidate in candidates:
            with ExitStack() as fetched:
                path = _fetch(store, candidate, state, layout, fetched, unusable)
                if path is None:
                    continue
                saver.resumes = True
                log.info("Resuming from %s%s.", candidate.name, "" if store is None else ", which was downloaded")
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


def _stores(saver: CheckpointSaver, logger: Logger) -> list[Any]:
    """Return the possible stores of the run's files: `ObjectStore`s, and logger destinations that can download."""
    if saver.latest_remote_file_name is None:
        return []
    keepers: list[Any] = []
    for place in getattr(logger, "destinations", ()):
        if place.can_upload_files():
            # The store itself where names agree, since unlike a logger destination it can be listed.
            backend = getattr(place, "remote_backend", None) if getattr(place, "keeps_names", True) else None
            keepers.append(backend if isinstance(backend, ObjectStore) else place)
    return keepers if saver.remote_uploader is None else [*keepers, saver.remote_uploader.remote_backend]


def _in_folder(saver: CheckpointSaver, state: State, layout: Layout) -> tuple[list[_Candidate], list[str]]:
    """Return the candidates in the saver's folder, newest first, and those that cannot be used, with the reason."""
    folder = format_name_with_dist(saver.folder, state.run_name)
    _refuse_unreadable(folder)  # `glob` does not raise, so an unreadable folder would look empty
    if layout is Layout.LOCAL and os.path.isdir(folder):
        # A save that was killed while renaming would look like files of several saves.
        complete_interrupted_sets(folder)
    pattern = os.path.join(glob.escape(folder), _as_glob(within_folder(state, saver.filename.filename), state))
    target = None if saver.latest_filename is None else read_pointer(saver.latest_filename.format(state))
    pointed = [] if target is None or not target.exists() else candidates_in(glob.escape(os.fspath(target)))[0]
    found, skipped = candidates_in(pattern)
    # The link may lead to a checkpoint that was saved under another `save_filename`.
    found += [candidate for candidate in pointed if candidate.path not in [one.path for one in found]]
    template = os.path.abspath(saver.filename.format(state, keep_placeholders=True))

    def name_of(path: Path) -> str:
        if layout is not Layout.LOCAL:
            return os.fspath(path)
        return "/" + _shared_name(os.path.abspath(path).lstrip("/"), template.lstrip("/"), state.run_name)

    later = [one.path for one in found if pointed and one.sorting_key()[:2] > pointed[0].sorting_key()[:2]]
    names = [_Candidate(name_of(one.path), str(target) if one.path in later else None) for one in found]
    # Dangling links do not count.
    return names, [f"{skip.path} ({skip.reason})" for skip in skipped if skip.path.exists()]


def _refuse_unreadable(folder: str) -> None:
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


def _as_glob(template: str, state: State) -> str:
    parts: list[str] = []
    for literal, name, _, _ in Formatter().parse(template):
        parts.append(glob.escape(literal))
        if name is None:
            continue
        known = partial_format(f"{{{name}}}", run_name=state.run_name, rank=0, local_rank=0, node_rank=0)
        # Numbers of the time stay open; the rank is 0, so that per-rank files match once.
        parts.append("*" if known.startswith("{") else glob.escape(known))
    return "".join(parts)


def _shared_name(name: str, template: str, run_name: str | None) -> str:
    """Return the name that per-rank files share, with `{rank}` in it, from the name of any of them."""
    numbers = numbers_in_name(name, template)
    numbers.pop("rank", None)
    return partial_format(template, run_name=run_name, **numbers)


def _in_store(store: Any, saver: CheckpointSaver, state: State) -> tuple[list[_Candidate], list[str]]:
    """Return the candidates in a store, newest first; one that only a pointer names comes last."""
    assert saver.latest_remote_file_name is not None
    layout, pointer = layout_of(state), saver.latest_remote_file_name.format(state)
    pointed = _pointed_to(store, pointer)
    if saver.remote_file_name is None:
        return [_Candidate(pointed or pointer)], []
    template = within_folder(state, saver.remote_file_name.filename).lstrip("/")
    template = partial_format(template, run_name=state.run_name)
    if layout is Layout.MONOLITHIC:
        template = partial_format(template, rank=0, local_rank=0, node_rank=0)
    times = _times_in(store, template, pointed, layout)
    names = sorted(times, key=times.__getitem__, reverse=True)
    num_later = sum(times[name] > times[pointed] for name in names) if pointed in times else 0
    # The pointer's target must come right after the later names, which are compared with it.
    names = [*names[:num_later], *[str(pointed)] * bool(num_later), *names[num_later:]]
    if layout is Layout.LOCAL:
        names = [_shared_name(name, template, state.run_name) for name in names]
    elif pointed is not None or layout is Layout.MONOLITHIC:
        names.append(pointed or pointer)
    later = dict.fromkeys(names[:num_later], names[num_later] if num_later else None)
    # Per-rank files share a name, and the target may be listed twice.
    return [_Candidate(name, later.get(name)) for name in dict.fromkeys(names)], []


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
    store: Any, candidate: _Candidate, state: State, layout: Layout, fetched: ExitStack, unusable: list[str]
) -> str | None:
    """Return the path of a checkpoint that is complete on every rank, or `None`. Every rank must call this.

    Each rank downloads what it needs, once per node, and verifies its hashes. An existing checkpoint that cannot be
    used is added to `unusable`; an unfinished one in a store is not.
    """
    name, is_here = candidate.name, store is None
    with ExitStack() as attempt:
        if layout is Layout.SHARDED and not is_here:
            path, error = _fetch_folder(store, name, state, attempt)
        else:
            path, error = _fetch_file(store, name, layout, attempt)
        is_unfinished = isinstance(error, NoCheckpointError)
        # Not even a part of it exists.
        is_absent = isinstance(error, FileNotFoundError | NotImplementedError) and not is_unfinished
        told = None if error is None else (is_absent, is_unfinished, str(error))
        problems: list[Any] = dist.all_gather_object(told)  # all ranks accept or skip the candidate together
        if not any(problems) and candidate.latest is not None:
            reason = Ranks().from_first(partial(_abandoned, candidate, path, store, layout))
            problems[0] = None if reason is None else (False, True, reason)
        if not any(problems):
            if is_here:
                _refuse_unseen(own_file(path))
            fetched.push(attempt.pop_all())  # keeps the download until the caller has loaded it
            return path
    rank = next(rank for rank, problem in enumerate(problems) if problem is not None)
    is_absent, is_unfinished, reason = problems[rank]
    # Logged on all ranks, since each has its own log.
    log.log(DEBUG if is_absent else WARNING, "Skipped %s: %s (on rank %d)", name, reason, rank)
    if not is_absent and (is_here or not is_unfinished):
        unusable.append(f"{name} ({reason})")
    return None


def _refuse_unseen(path: str) -> None:
    """Raise on all ranks if any of them does not have a file of the folder."""
    if missing := [rank for rank, sees in enumerate(dist.all_gather_object(os.path.exists(path))) if not sees]:
        raise RuntimeError(
            f"autoresume found {path} on rank 0, and ranks {missing} do not see it. Save to a disk that all nodes "
            f"share, or to a store."
        )


def _abandoned(candidate: _Candidate, path: str, store: Any, layout: Layout) -> str | None:
    """Return the reason if a complete checkpoint belongs to an abandoned run, or `None`.

    If the pointer's target is damaged, later checkpoints are accepted.
    """
    name, found = str(candidate.latest), list[Manifest | None]()
    if fault_of(name, lambda: found.append(_manifest_in(store, name, layout))) is not None or found[0] is None:
        return None
    is_remote_folder = layout is Layout.SHARDED and store is not None
    own = read_sharded_manifest(open_source(path, {})) if is_remote_folder else manifest_of(Path(own_file(path)))
    if own is None:
        return WITHOUT_MANIFEST
    lineage = found[0].info.get(LINEAGE_KEY)
    if lineage is None or own.info.get(LINEAGE_KEY) == lineage:
        return None
    return f"it belongs to a run that was abandoned: the latest one is {name}"


def _manifest_in(store: Any, name: str, layout: Layout) -> Manifest | None:
    if store is None:
        return manifest_of(Path(own_file(name)))
    if layout is Layout.SHARDED:
        return Manifest.from_json(read_object(store, f"{name}/{MANIFEST_NAME}"))
    with tempfile.TemporaryDirectory(prefix="composer-resume-") as folder:
        name = own_file(name)
        place = os.path.join(folder, posixpath.basename(name))
        get_file(name, place, store, overwrite=True, progress_bar=False)
        return read_manifest(place)


def _fetch_file(store: Any, name: str, layout: Layout, attempt: ExitStack) -> tuple[str, Exception | None]:
    """Download and verify a file, or verify a checkpoint of the folder. Every rank must call this."""
    # Each rank has a file of its own, or one rank reads the file: rank 0 on a shared disk, or the first of each node.
    reads = layout is Layout.LOCAL or (dist.get_global_rank() if store is None else dist.get_local_rank()) == 0
    path = name if store is None else _place_for(name, layout, attempt)

    def fetch() -> tuple[list[Any], Exception | None]:
        manifests: list[Manifest | None] = []
        problem = fault_of(name, lambda: manifests.append(_fetch_and_check(store, name, path))) if reads else None
        return [None if manifest is None else manifest.info.get(SAVE_ID_KEY) for manifest in manifests], problem

    save_ids, problem = Ranks().together(fetch)
    if layout is Layout.LOCAL:
        gathered = dist.all_gather_object(save_ids)
        try:
            refuse_mixed_saves([save_id for own_ids in gathered for save_id in own_ids], name)
        except CorruptCheckpointError as error:
            problem = problem or error
    return path, problem


def _place_for(name: str, layout: Layout, attempt: ExitStack) -> str:
    """Return the temporary path of a download. Every rank must call this."""
    own = attempt.enter_context(tempfile.TemporaryDirectory(prefix="composer-resume-"))
    base = os.path.basename(name)
    if layout is Layout.LOCAL:
        # The rank may be in the name of a folder only, and the downloads of all ranks need different names.
        return os.path.join(own, base if "{rank}" in base else f"{{rank}}-{base}")
    own = of_first_rank_of_node(own)  # the ranks of a node share the folder of the one that downloads
    # The rank that downloaded must not delete the file before the others have read it. After an exception, other ranks
    # may not reach the barrier.
    attempt.push(lambda kind, *_: dist.barrier() if kind is None else None)
    return os.path.join(own, base)


def _fetch_and_check(store: Any, name: str, path: str) -> Manifest | None:
    """Fetch this rank's file, verify it, refuse it if a run cannot resume from it, and return its manifest."""
    here = own_file(path)
    try:
        if store is not None:
            get_file(own_file(name), here, store, overwrite=True, progress_bar=False)
        elif not os.path.exists(here) and os.path.exists(of_first := path.replace("{rank}", "0")):
            manifest = read_manifest(of_first)
            saved_by = dist.get_world_size() if manifest is None else manifest.info.get("world_size")
            if isinstance(saved_by, int) and saved_by < dist.get_world_size():  # this rank's file was never written
                raise IncompatibleCheckpointError(str(other_number_of_ranks(of_first, saved_by)))
    except FileNotFoundError as error:
        if "{rank}" not in name:
            raise
        # Unfinished instead of absent, since other ranks may have files of this save.
        raise NoCheckpointError(f"there is no file of rank {dist.get_global_rank()}: {error}") from error
    manifest = verify(here)
    _refuse_partial(manifest, here, name)
    return manifest


def _refuse_partial(manifest: Manifest | None, path: str, name: str) -> None:
    if manifest is not None and manifest.info.get("weights_only"):
        raise IncompatibleCheckpointError(f"{name} holds the weights only, from which a run cannot resume.")
    if manifest is None and os.path.isfile(path) and "state" not in inspect_file(path).keys:
        raise IncompatibleCheckpointError(f"{name} has no 'state', so it is not a checkpoint of a training run.")


def _fetch_folder(store: Any, name: str, state: State, attempt: ExitStack) -> tuple[str, Exception | None]:
    if not isinstance(store, ObjectStore):
        return "", NotImplementedError(f"{type(store).__name__} has no folders.")
    address = attempt.enter_context(fetch_once_per_node(store, name))

    def read() -> None:
        # Each step fails on all ranks or on none, so that all ranks take part in the next one.
        Ranks().together(lambda: _refuse_partial(read_sharded_manifest(open_source(address, {})), address, name))
        check_sharded(empty_content(address, state, weights_only=False), address)

    return address, fault_of(name, read)


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
