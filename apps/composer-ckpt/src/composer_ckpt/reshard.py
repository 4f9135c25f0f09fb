"""The command `composer-ckpt reshard`, which splits a checkpoint into other files."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from composer_checkpoint import write_atomically
from composer_checkpoint.remote.fetch import is_uri
from composer_checkpoint.tensors import (
    TensorSource,
    find_kind,
    plan_shards,
    refuse_unfit,
    stream_local,
    stream_sharded,
    stream_shards,
)
from composer_ckpt.folders import is_weight_file
from composer_ckpt.output import DEFAULT_SHARD_BYTES, Result, UsageError, counted, format_size, progress_bar
from composer_ckpt.sources import fetched, opened, place_of
from composer_ckpt.targets import clear_leftovers, may_replace


def reshard(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt reshard`."""
    with fetched(options.source, options.tmp_dir, options.jobs) as local:
        return _reshard(local, options)


def _reshard(local: str, options: argparse.Namespace) -> Result:
    place = place_of(local)
    kind = options.kind if options.kind != "auto" else find_kind(place)
    by_size = kind in ("hf", "safetensors")
    if not by_size and kind not in ("dcp", "local"):
        raise UsageError(
            f"SRC={options.source!r} is {kind}, which is not cut into files of its own format. Use convert --to dcp or "
            f"--to hf."
        )
    # Some formats are split by size and the others by rank, and each needs or rejects --world-size accordingly.
    if by_size == (options.world_size is not None) or (options.max_shard_size is not None and not by_size):
        raise UsageError(
            f"a checkpoint of the format {kind} is cut by {'--max-shard-size' if by_size else '--world-size N'}."
        )
    if is_uri(options.target):
        raise UsageError(
            f"DST={options.target!r} is in a store, and reshard writes on this machine. Copy it afterwards."
        )
    if not options.dry_run:
        options.overwrite = may_replace(
            options.target, [options.source], overwrite=options.overwrite, is_folder=kind != "local"
        )
        clear_leftovers(options.target, options.world_size)
    with opened(local, kind, verify=not options.dry_run) as source:
        total = sum(tensor.size_bytes for tensor in source.tensors.values())
        plan = _plan(source, kind, options)
        if not options.dry_run:
            with progress_bar("writing", total, quiet=options.quiet) as progress:
                _write(source, kind, place, options, progress)
    data = {"source": options.source, "target": options.target, "format": kind, "files": plan, "bytes": total}
    verb = "would write" if options.dry_run else "wrote"
    what = f"{counted(len(source.tensors), 'tensor')}, {format_size(total)}, in {counted(len(plan), 'file')}"
    return Result(f"{verb} {what} to {options.target}", data)


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
