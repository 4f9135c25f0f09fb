"""`composer-ckpt repair`: links that lead nowhere, and what killed writers have left, in the folder of a run."""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

from composer_checkpoint import FolderLock, Found, NoCheckpointError, find_newest, read_pointer, replace_pointer
from composer_checkpoint.commit import find_leftovers, remove_leftovers
from composer_ckpt.latest import folder_of
from composer_ckpt.outcomes import Result, UsageError

__all__ = ["repair"]


def repair(options: argparse.Namespace) -> Result:
    """Run the command."""
    folder = folder_of(options.folder)
    link = None if options.link is None else _link_at(folder, options.link)
    # Nobody saves there meanwhile, so that what is unfinished is known to be left over, whoever wrote it.
    with nullcontext() if options.dry_run else FolderLock(folder):
        leftovers = find_leftovers(folder, locked=True)
        if options.delete and not options.dry_run:
            remove_leftovers(folder, locked=True)
        found = find_newest(folder)
        links = _broken_links(folder) if link is None else [link]
        if found is None and link is not None:
            raise NoCheckpointError(f"there is no whole checkpoint in {options.folder} that a link could lead to.")
        if found is not None and not options.dry_run:
            for place in links:
                replace_pointer(place, found.path)
    data = {
        "folder": options.folder,
        "newest": None if found is None else os.fspath(found.path),
        "links": [os.fspath(place) for place in links],
        "leftovers": [os.fspath(place) for place in leftovers],
        "skipped": [] if found is None else [{"path": str(s.path), "reason": s.reason} for s in found.skipped],
        "deleted": options.delete and not options.dry_run,
        "written": not options.dry_run,
    }
    return Result("\n".join(_lines(options, found, links, leftovers)), data)


def _link_at(folder: Path, name: str) -> Path:
    if Path(name).name != name or name in ("", ".", ".."):
        raise UsageError(f"--link {name!r} is no plain name. Give one in the folder, such as latest-rank0.pt.")
    link = folder / name
    if link.exists() and not link.is_symlink() and read_pointer(link) is None:
        raise UsageError(f"--link {name!r}: there is something else of this name, which a link would replace.")
    return link


def _broken_links(folder: Path) -> list[Path]:
    """Return the links of the folder that lead to what was once beside them."""
    broken = [path for path in sorted(folder.iterdir()) if path.is_symlink() and not path.exists()]
    return [path for path in broken if (target := read_pointer(path)) is not None and target.parent == path.parent]


def _lines(options: argparse.Namespace, found: Found | None, links: list[Path], leftovers: list[Path]) -> list[str]:
    would = "would be " if options.dry_run else ""
    lines = [f"{options.folder}: {'no whole checkpoint' if found is None else f'the newest is {found.path.name}'}"]
    for place in links:
        done = f"{would}led to {found.path.name}" if found is not None else "leads nowhere, and there is nothing else"
        lines.append(f"  {place.name}: {done}")
    for place in leftovers:
        lines.append(f"  {place.name}: {f'{would}removed' if options.delete else 'left unfinished (--delete)'}")
    return lines if links or leftovers else [*lines, "  nothing to repair"]
