"""The checkpoint with which a run that was started again goes on."""

import glob
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from composer_checkpoint.conflicts import numbers_in_name
from composer_checkpoint.discover import Found, find_newest
from composer_checkpoint.errors import CheckpointError, IncompatibleCheckpointError
from composer_checkpoint.fetching import get_file
from composer_checkpoint.names import format_name_with_dist, partial_format
from composer_checkpoint.pointers import read_pointer
from composer_checkpoint.publish import SYMLINK_SUFFIX
from composer_checkpoint.save_names import within_folder
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.state_io import Layout, layout_of
from composer_checkpoint.verify import verify
from composer_dist import dist

if TYPE_CHECKING:
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events import Logger, State

__all__ = ["checkpoint_to_resume"]

log = getLogger(__name__)


@contextmanager
def checkpoint_to_resume(saver: "CheckpointSaver", state: "State", logger: "Logger") -> Iterator[str | None]:
    """Give the path of the newest whole checkpoint that a saver has saved, or `None` if there is none.

    The saver's folder is looked through first, then the loggers that keep files, then the saver's store. The link to
    the latest checkpoint decides nothing by itself: what it leads to may be damaged, or not the newest. What is
    skipped is logged, with the reason. Every rank must call this.

    Args:
        saver: Which will go on to save. Its names say what is looked for.
        state: The training state, not changed.
        logger: Has the destinations that keep files.

    Yields:
        The path, for `load_checkpoint`. What was downloaded is deleted afterwards.

    Raises:
        RuntimeError: If the first rank has found a checkpoint that others cannot see.
    """
    layout = layout_of(state)
    found: list[str | None] = [None]
    Ranks().together(lambda: _search(found, saver, state, layout) if dist.get_global_rank() == 0 else None)
    dist.broadcast_object_list(found, src=0)
    path = found[0]
    if path is not None:
        _check_all_see(path, layout)
        log.info("Resuming from %s.", path)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="composer-resume-") as folder:
        yield _download(Path(folder), saver, state, logger) if layout is Layout.MONOLITHIC else None


def _search(found: list[str | None], saver: "CheckpointSaver", state: "State", layout: Layout) -> None:
    folder = format_name_with_dist(saver.folder, state.run_name)
    template = within_folder(state, saver.filename.filename)

    def check(path: Path) -> None:
        names = [os.fspath(path)]
        if layout is Layout.LOCAL:
            shared = _with_rank(path, folder, template, state)
            names = [shared.replace("{rank}", str(rank)) for rank in range(dist.get_world_size())]
        for name in names:
            _check(name)

    newest = find_newest(os.path.join(glob.escape(folder), _as_glob(template, state)), verify=check)
    if newest is None and saver.latest_filename is not None:
        target = read_pointer(saver.latest_filename.format(state))  # perhaps saved under another save_filename
        newest = None if target is None or not target.exists() else _newest_of(target)
    if newest is not None:
        path = newest.path
        found[0] = _with_rank(path, folder, template, state) if layout is Layout.LOCAL else os.fspath(path)


def _newest_of(target: Path) -> Found | None:
    return find_newest(glob.escape(os.fspath(target)), verify=lambda path: _check(os.fspath(path)))


def _check(path: str) -> None:
    manifest = verify(path)
    if manifest is not None and manifest.info.get("weights_only"):
        raise IncompatibleCheckpointError(f"{path} holds the weights only, from which no run goes on.")


def _with_rank(path: Path, folder: str, template: str, state: "State") -> str:
    """Return the name that per-rank files share, with `{rank}` in it."""
    numbers = numbers_in_name(os.path.relpath(path, folder), template)
    numbers.pop("rank", None)
    return os.path.join(folder, partial_format(template, run_name=state.run_name, **numbers))


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
    own = path.replace("{rank}", str(dist.get_global_rank())) if layout is Layout.LOCAL else path
    missing = [rank for rank, sees in enumerate(dist.all_gather_object(os.path.exists(own))) if not sees]
    if missing:
        raise RuntimeError(
            f"autoresume found {path} on rank 0, and ranks {missing} do not see it. Save to a disk that all nodes "
            f"share, or to a store."
        )


def _download(folder: Path, saver: "CheckpointSaver", state: "State", logger: "Logger") -> str | None:
    """Download the newest whole checkpoint of the loggers or the saver's store, once on each node."""
    if saver.latest_remote_file_name is None:
        return None
    chosen: list[Any] = [None]
    if dist.get_global_rank() == 0:
        chosen[0] = _choose(folder, saver, state, logger)
    dist.broadcast_object_list(chosen, src=0)
    if chosen[0] is None:
        return None
    index, name = chosen[0]
    own = folder / os.path.basename(name)
    if dist.get_local_rank() == 0 and dist.get_global_rank() != 0:
        get_file(name, own, _stores(saver, logger)[index], progress_bar=False)
    paths = dist.all_gather_object((dist.get_node_rank(), dist.get_local_rank(), os.fspath(own)))
    return next(path for node, local, path in paths if node == dist.get_node_rank() and local == 0)


def _choose(folder: Path, saver: "CheckpointSaver", state: "State", logger: "Logger") -> tuple[int, str] | None:
    """Return which store has the newest whole checkpoint, and its name there; it is in the folder by then."""
    assert saver.latest_remote_file_name is not None
    pointer = saver.latest_remote_file_name.format(state)
    for index, store in enumerate(_stores(saver, logger)):
        for name in _names_in(store, pointer, saver, state):
            destination = folder / os.path.basename(name)
            try:
                get_file(name, destination, store, overwrite=True, progress_bar=False)
                _check(os.fspath(destination))
            except (FileNotFoundError, NotImplementedError):
                continue
            except CheckpointError as error:
                log.warning("Skipped %s: %s", name, error)
                continue
            log.info("Resuming from %s, which was downloaded.", name)
            return index, name
    return None


def _stores(saver: "CheckpointSaver", logger: "Logger") -> list[Any]:
    keepers = [place for place in getattr(logger, "destinations", ()) if place.can_upload_files()]
    return keepers if saver.remote_uploader is None else [*keepers, saver.remote_uploader.remote_backend]


def _names_in(store: Any, pointer: str, saver: "CheckpointSaver", state: "State") -> Iterator[str]:
    """Yield what a pointer names, then all others that the saver may have saved, newest first."""
    yield pointer + SYMLINK_SUFFIX
    yield pointer
    if saver.remote_file_name is None or not hasattr(store, "list_objects"):
        return
    template = partial_format(saver.remote_file_name.filename, run_name=state.run_name, rank=0)
    prefix = re.split(r"[{]", template, maxsplit=1)[0]
    numbered: list[tuple[dict[str, int], str]] = []
    for name in store.list_objects(prefix):
        numbers = numbers_in_name(name, template)
        if numbers:
            numbered.append((numbers, name))
    order = ("batch", "sample", "token", "epoch")
    numbered.sort(key=lambda pair: [pair[0].get(unit, 0) for unit in order], reverse=True)
    yield from (name for _, name in numbered)
