"""The commands `composer-ckpt extract` and `composer-ckpt repair`."""

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from composer_checkpoint import (
    FolderLock,
    Found,
    NoCheckpointError,
    find_newest,
    read_pointer,
    replace_pointer,
    write_atomically,
)
from composer_checkpoint.commit import find_leftovers, remove_leftovers
from composer_checkpoint.remote.fetch import is_uri
from composer_checkpoint.tensors import (
    StoredTensor,
    TensorSource,
    aliases_of,
    refuse_unfit,
    stream_pt,
    stream_safetensors,
    tensors_in,
)
from composer_ckpt.dtypes import dtype_name, layout_of
from composer_ckpt.output import Result, UsageError, counted, format_size, progress_bar
from composer_ckpt.selection import refuse_doubles, select
from composer_ckpt.sources import folder_of, opened
from composer_ckpt.targets import clear_leftovers, may_replace


def extract(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt extract`."""
    target = Path(options.target)
    if target.suffix not in (".safetensors", ".pt", ".json"):
        raise UsageError(f"DST={options.target!r} is none of .safetensors, .pt and .json. Choose one of these endings.")
    if is_uri(options.target):
        raise UsageError(
            f"DST={options.target!r} is in a store, and extract writes on this machine. Copy it afterwards."
        )
    # Checked before the source is opened, which may mean a long download.
    if not options.dry_run:
        options.overwrite = may_replace(options.target, [options.source], overwrite=options.overwrite, is_folder=False)
        clear_leftovers(options.target)
    more = {"tmp_dir": options.tmp_dir, "jobs": options.jobs, "verify": not options.dry_run}
    with opened(options.source, options.kind, **more) as source:
        if target.suffix == ".json":
            return _extract_data(source, target, options)
        tensors = select(_named(source), options.include, options.exclude)
        aliases = aliases_of(tensors)
        # safetensors stores aliases as metadata, `.pt` stores shared storages by itself.
        own = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        if target.suffix == ".safetensors":
            refuse_unfit(own, "safetensors", target, aliases=aliases)
        else:
            refuse_unfit(tensors, "pt", target)
        total = sum(tensor.size_bytes for tensor in own.values())
        if not options.dry_run:
            with (
                progress_bar("extracting", total, quiet=options.quiet) as progress,
                write_atomically(target, overwrite=options.overwrite, need_bytes=total) as unfinished,
            ):
                if target.suffix == ".pt":
                    stream_pt(tensors, unfinished, progress=progress)
                else:
                    stream_safetensors(own, unfinished, aliases=aliases, progress=progress)
    data = {"source": options.source, "target": options.target, "tensors": list(tensors), "bytes": total}
    verb = "would write" if options.dry_run else "wrote"
    return Result(f"{verb} {counted(len(tensors), 'tensor')}, {format_size(total)}, to {options.target}", data)


def _named(source: TensorSource) -> dict[str, StoredTensor]:
    """Return the model's tensors by their own names, and all others by their paths in the checkpoint."""
    weights = dict(source.weights)
    own = {id(tensor) for tensor in weights.values()}
    others = {name: tensor for name, tensor in source.tensors.items() if id(tensor) not in own}
    if doubled := weights.keys() & others.keys():
        raise UsageError(
            f"{min(doubled)!r} is the name of a weight and the path of another tensor, and a file can have only one of "
            f"them. Load the checkpoint with load_file() and save the tensors that you want with save_file()."
        )
    return weights | others


def _extract_data(source: TensorSource, target: Path, options: argparse.Namespace) -> Result:
    if options.include or options.exclude:
        raise UsageError("--include and --exclude choose tensors, of which a .json has none. Leave them out.")
    text = json.dumps(_as_json(source.tree), indent=2)
    if not options.dry_run:
        with write_atomically(target, overwrite=options.overwrite) as unfinished:
            unfinished.write_text(text + "\n")
    count = len(tensors_in(source.tree))
    data = {"source": options.source, "target": options.target, "tensors": [], "bytes": len(text)}
    verb = "would write" if options.dry_run else "wrote"
    return Result(f"{verb} all but the elements of {counted(count, 'tensor')} to {options.target}", data)


def _as_json(value: Any, depth: int = 0) -> Any:
    if depth > 100:  # a nested structure of a foreign checkpoint must not exhaust the stack
        return "..."
    if isinstance(value, StoredTensor):
        return {"tensor": dtype_name(value.dtype), "shape": list(value.shape), **layout_of(value)}
    if isinstance(value, Mapping):
        refuse_doubles((repr(key), str(key)) for key in value)  # such as 1 and "1", the same key in JSON
        return {str(key): _as_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json(item, depth + 1) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def repair(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt repair`."""
    folder, writes = folder_of(options.folder), not options.dry_run
    link = [] if options.link is None else [_link_at(folder, options.link)]
    # Under the lock no run saves here, so every unfinished file is left over from a killed process.
    with FolderLock(folder) if writes else nullcontext():
        leftovers = find_leftovers(folder, locked=True)
        if options.delete and writes:
            remove_leftovers(folder, locked=True)
        found = find_newest(folder)
        links = link or _broken_links(folder)
        # Checked before anything is linked: `--link` must not create a dangling link.
        if found is None and link:
            raise NoCheckpointError(f"there is no whole checkpoint in {options.folder} that a link could lead to.")
        if found is not None and writes:
            for place in links:
                replace_pointer(place, found.path)
    skipped = found.skipped if found else []
    data = {
        "folder": options.folder,
        "newest": None if found is None else os.fspath(found.path),
        "links": list(map(os.fspath, links)),
        "leftovers": list(map(os.fspath, leftovers)),
        "skipped": [{"path": str(skip.path), "reason": skip.reason} for skip in skipped],
        "deleted": options.delete and writes,
        "written": writes,
    }
    return Result("\n".join(_lines(options, found, links, leftovers)), data)


def _link_at(folder: Path, name: str) -> Path:
    if Path(name).name != name or name in ("", ".", ".."):
        raise UsageError(f"--link {name!r} is not a plain name. Give one in the folder, such as latest-rank0.pt.")
    link = folder / name
    if link.exists() and not link.is_symlink() and read_pointer(link) is None:
        raise UsageError(f"--link {name!r}: this name is taken by something that is not a link. Choose another name.")
    return link


def _broken_links(folder: Path) -> list[Path]:
    """Return the broken links whose targets were in the same folder."""
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
