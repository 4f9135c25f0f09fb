"""The checkpoint with which a run that was started again goes on."""

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from composer_checkpoint._interrupted_sets import complete_interrupted_sets
from composer_checkpoint._shared_checks import shared_check
from composer_checkpoint.discover import look_through
from composer_checkpoint.errors import IncompatibleCheckpointError, StorageError
from composer_checkpoint.files import read_manifest
from composer_checkpoint.local_files import SAVE_ID_KEY, refuse_mixed_saves
from composer_checkpoint.names import format_name_with_dist, partial_format
from composer_checkpoint.pointers import read_pointer
from composer_checkpoint.remote_resume import fetched_from_stores, refuse_what_does_not_resume, shared_name
from composer_checkpoint.save_names import within_folder
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.state_io import Layout, layout_of
from composer_checkpoint.verify import verify
from composer_dist import dist

if TYPE_CHECKING:
    from composer_checkpoint.manifest import Manifest
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events import Logger, State

__all__ = ["checkpoint_to_resume"]

log = getLogger(__name__)


@contextmanager
def checkpoint_to_resume(saver: "CheckpointSaver", state: "State", logger: "Logger") -> Iterator[str | None]:
    """Give the path of the newest whole checkpoint that a saver has saved, or `None` if there is none.

    The saver's folder is looked through first, then the loggers that keep files, then the saver's store. The link to
    the latest checkpoint decides little by itself: what it leads to may be damaged, or not the newest. But later ones
    of another run, from which somebody has gone back to where the link leads, are left out. What is skipped is
    logged, with the reason; from a store, on every rank. Every rank must call this.

    Args:
        saver: Which will go on to save. Its names say what is looked for, and its `resumes` is set.
        state: The training state, not changed.
        logger: Has the destinations that keep files.

    Yields:
        The path, for `load_checkpoint`; of a sharded checkpoint in a store its address, of which each rank has fetched
        what it needs. What was downloaded is deleted afterwards.

    Raises:
        RuntimeError: If the first rank has found a checkpoint that others cannot see.
        CheckpointConflictError: If there are checkpoints, and none of them can be used: a run that begins anew would
            replace them.
        NewerCheckpointError: If the newest is of a newer format.
        StorageError: If a disk or store fails, or refuses.
    """
    layout = layout_of(state)
    found: list[Any] = [None, []]
    Ranks().together(lambda: _search_together(found, saver, state, layout))
    dist.broadcast_object_list(found, src=0)
    path, unusable = found
    saver.resumes = path is not None
    if path is not None:
        _check_all_see(path, layout)
        log.info("Resuming from %s.", path)
        yield path
        return
    with fetched_from_stores(saver, state, logger, layout, unusable) as path:
        saver.resumes = path is not None
        yield path


def _search_together(found: list[Any], saver: "CheckpointSaver", state: "State", layout: Layout) -> None:
    """Let rank 0 look through the folder. Of per-rank files each rank looks at its own, so that they share the work."""
    if layout is not Layout.LOCAL:
        if dist.get_global_rank() == 0:
            _search(found, saver, state, layout, lambda path: [_check(path)])
        return
    with shared_check(_check_own) as check_each:
        if dist.get_global_rank() == 0:
            _search(found, saver, state, layout, check_each)


def _search(
    found: list[Any],
    saver: "CheckpointSaver",
    state: "State",
    layout: Layout,
    check_each: Callable[[str], "list[Manifest | None]"],
) -> None:
    """Look through the folder for the path, and for what is there and cannot be used, with the reasons."""
    folder = format_name_with_dist(saver.folder, state.run_name)
    template = within_folder(state, saver.filename.filename)
    if layout is Layout.LOCAL and os.path.isdir(folder):
        complete_interrupted_sets(folder)

    def check(path: Path) -> None:
        manifests = check_each(_with_rank(path, saver, state) if layout is Layout.LOCAL else os.fspath(path))
        refuse_mixed_saves(
            [None if manifest is None else manifest.info.get(SAVE_ID_KEY) for manifest in manifests], path
        )

    _refuse_unreadable(folder)
    target = None if saver.latest_filename is None else read_pointer(saver.latest_filename.format(state))
    latest = target if target is not None and target.exists() else None
    pattern = os.path.join(glob.escape(folder), _as_glob(template, state))
    newest, skipped = look_through(pattern, verify=check, latest=latest)
    if newest is None and latest is not None and latest not in [skip.path for skip in skipped]:
        # Perhaps saved under another save_filename.
        newest, others = look_through(glob.escape(os.fspath(latest)), verify=lambda path: _check(os.fspath(path)))
        skipped += others
    found[1] = [f"{skip.path} ({skip.reason})" for skip in skipped if skip.path.exists()]  # and no link to nowhere
    if newest is not None:
        path = newest.path
        found[0] = _with_rank(path, saver, state) if layout is Layout.LOCAL else os.fspath(path)


def _refuse_unreadable(folder: str) -> None:
    """Raise if a folder cannot be looked through: nobody knows then which checkpoints there are."""
    try:
        os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise StorageError(
            error.errno,
            f"save_folder={folder!r} cannot be looked through for checkpoints: {error.strerror or error}. Look at the "
            f"disk and the permissions, or choose another folder",
        ) from error


def _check(path: str) -> "Manifest | None":
    manifest = verify(path)
    refuse_what_does_not_resume(manifest, path, path)
    return manifest


def _check_own(path: str) -> "Manifest | None":
    own, of_first = _own(path), path.replace("{rank}", "0")
    if not os.path.exists(own) and os.path.exists(of_first):
        manifest = read_manifest(of_first)
        saved_by = None if manifest is None else manifest.info.get("world_size")
        if isinstance(saved_by, int) and saved_by < dist.get_world_size():
            raise IncompatibleCheckpointError(
                f"{saved_by} ranks saved these files, and {dist.get_world_size()} look for theirs: per-rank files are "
                f"not elastic. Start {saved_by} ranks, or put the files together with "
                f"composer_checkpoint.local_files.merge_local"
            )
    return _check(own)


def _with_rank(path: Path, saver: "CheckpointSaver", state: "State") -> str:
    """Return the path that per-rank files share, with `{rank}` in it, which may be in the folder's name, too."""
    template = os.path.abspath(saver.filename.format(state, keep_placeholders=True))
    return "/" + shared_name(os.path.abspath(path).lstrip("/"), template.lstrip("/"), state.run_name)


def _own(path: str) -> str:
    return path.replace("{rank}", str(dist.get_global_rank()))


def _as_glob(template: str, state: "State") -> str:
    parts: list[str] = []
    for literal, name, _, _ in Formatter().parse(template):
        parts.append(glob.escape(literal))
        if name is None:
            continue
        known = partial_format(f"{{{name}}}", run_name=state.run_name, rank=0, local_rank=0, node_rank=0)
        parts.append("*" if known.startswith("{") else glob.escape(known))
    return "".join(parts)


def _check_all_see(path: str, layout: Layout) -> None:
    own = _own(path) if layout is Layout.LOCAL else path
    missing = [rank for rank, sees in enumerate(dist.all_gather_object(os.path.exists(own))) if not sees]
    if missing:
        raise RuntimeError(
            f"autoresume found {path} on rank 0, and ranks {missing} do not see it. Save to a disk that all nodes "
            f"share, or to a store."
        )
