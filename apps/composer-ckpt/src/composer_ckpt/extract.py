"""The commands `composer-ckpt reshard`, `extract` and `repair`, which copy tensors as they are."""

import argparse
import json
import os
import shutil
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
from composer_checkpoint.lock import find_leftovers, remove_leftovers
from composer_checkpoint.stores.base import is_uri
from composer_checkpoint.tensors import (
    StoredTensor,
    TensorSource,
    aliases_of,
    find_kind,
    plan_shards,
    refuse_unfit,
    stream_local,
    stream_pt,
    stream_safetensors,
    stream_sharded,
    stream_shards,
    tensors_in,
)
from composer_ckpt.folders import is_weight_file
from composer_ckpt.output import DEFAULT_SHARD_BYTES, Result, UsageError, counted, format_size, progress_bar
from composer_ckpt.places import clear_leftovers, fetched, folder_of, may_replace, opened, place_of
from composer_ckpt.weights import dtype_name, layout_of, refuse_doubles, select


def reshard(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt reshard`."""
    with fetched(options.source, options.tmp_dir, options.jobs) as local:
        place = place_of(local)
        kind = options.kind if options.kind != "auto" else find_kind(place)
        by_size = kind in ("hf", "safetensors")
        if not by_size and kind not in ("dcp", "local"):
            raise UsageError(
                f"SRC={options.source!r} is {kind}, which is not cut into files of its format. Use convert --to dcp or "
                f"--to hf."
            )
        # Some formats are split by size and the others by rank, and each needs or rejects --world-size accordingly.
        if by_size == (options.world_size is not None) or (options.max_shard_size is not None and not by_size):
            raise UsageError(
                f"a checkpoint of the format {kind} is cut by {'--max-shard-size' if by_size else '--world-size N'}."
            )
        _prepare_target(options, is_folder=kind != "local", world_size=options.world_size)
        with opened(local, kind, verify=not options.dry_run) as source:
            total = sum(tensor.size_bytes for tensor in source.tensors.values())
            plan = _plan(source, kind, options)
            if not options.dry_run:
                with progress_bar("writing", total, quiet=options.quiet) as progress:
                    _write(source, kind, place, options, progress)
        what = f"{counted(len(source.tensors), 'tensor')}, {format_size(total)}, in {counted(len(plan), 'file')}"
        return _written(options, what, format=kind, files=plan, bytes=total)


def _prepare_target(options: argparse.Namespace, *, is_folder: bool, world_size: int | None = None) -> None:
    if is_uri(options.target):
        raise UsageError(f"DST={options.target!r} is in a store. Write on this machine, and copy it afterwards.")
    if not options.dry_run:
        sources = [options.source]
        options.overwrite = may_replace(options.target, sources, overwrite=options.overwrite, is_folder=is_folder)
        clear_leftovers(options.target, world_size)


def _written(options: argparse.Namespace, what: str, **data: Any) -> Result:
    verb = "would write" if options.dry_run else "wrote"
    return Result(f"{verb} {what} to {options.target}", {"source": options.source, "target": options.target, **data})


def _plan(source: TensorSource, kind: str, options: argparse.Namespace) -> list[str]:
    match kind:
        case "dcp":
            return [f"__{rank}_0.distcp" for rank in range(options.world_size)]
        case "local":
            return [Path(options.target.replace("{rank}", str(rank))).name for rank in range(options.world_size)]
        case _:
            shards = _shards(source, options)
            for name, tensors in shards.items():
                refuse_unfit(tensors, "safetensors", Path(options.target, name))
            return list(shards)


def _shards(source: TensorSource, options: argparse.Namespace) -> dict[str, Any]:
    # Aliases are metadata of safetensors, so a tied tensor is written once.
    own = {name: tensor for name, tensor in source.weights.items() if name not in source.aliases}
    return plan_shards(own, options.max_shard_size or DEFAULT_SHARD_BYTES)


def _write(source: TensorSource, kind: str, place: Path, options: argparse.Namespace, progress: Any) -> None:
    # `encoded` describes the encoding of the files that are replaced.
    info = {} if source.manifest is None else {k: v for k, v in source.manifest.info.items() if k != "encoded"}
    settings = {"info": info, "overwrite": options.overwrite, "progress": progress}
    if kind == "dcp":
        stream_sharded(source.tree, options.target, num_files=options.world_size, **settings)
        return
    if kind == "local":
        stream_local(source.tree, options.target, world_size=options.world_size, **settings)
        return
    need = sum(tensor.size_bytes for tensor in source.tensors.values())
    with write_atomically(
        options.target, overwrite=options.overwrite, folder=True, need_bytes=need, keep_others=True
    ) as folder:
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_file() and not is_weight_file(path.name):
                shutil.copyfile(path, folder / path.name)
        stream_shards(_shards(source, options), folder, aliases=source.aliases, progress=progress)


def extract(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt extract`."""
    target = Path(options.target)
    if target.suffix not in (".safetensors", ".pt", ".json"):
        raise UsageError(f"DST={options.target!r} is none of .safetensors, .pt and .json. Choose one of these endings.")
    _prepare_target(options, is_folder=False)  # before the source is opened, which may mean a long download
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
    what = f"{counted(len(tensors), 'tensor')}, {format_size(total)},"
    return _written(options, what, tensors=list(tensors), bytes=total)


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
    what = f"all but the elements of {counted(len(tensors_in(source.tree)), 'tensor')}"
    return _written(options, what, tensors=[], bytes=len(text))


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
