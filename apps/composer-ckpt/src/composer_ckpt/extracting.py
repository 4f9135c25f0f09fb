"""`composer-ckpt extract`: some tensors in a file of their own, or all but the tensors as JSON."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_checkpoint import write_atomically
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
from composer_ckpt.inspecting import dtype_name, layout_of
from composer_ckpt.outcomes import Result, UsageError
from composer_ckpt.progress import progress_bar
from composer_ckpt.selection import refuse_doubles, select
from composer_ckpt.sizes import counted, format_size
from composer_ckpt.sources import opened
from composer_ckpt.targets import clear_leftovers, may_replace

__all__ = ["extract"]


def extract(options: argparse.Namespace) -> Result:
    """Run the command."""
    target = Path(options.target)
    if target.suffix not in (".safetensors", ".pt", ".json"):
        raise UsageError(f"DST={options.target!r} is none of .safetensors, .pt and .json. Choose one of these endings.")
    if is_uri(options.target):
        raise UsageError(
            f"DST={options.target!r} is in a store, and extract writes on this machine. Copy it afterwards."
        )
    if not options.dry_run:
        options.overwrite = may_replace(options.target, [options.source], overwrite=options.overwrite, is_folder=False)
        clear_leftovers(options.target)
    with opened(
        options.source,
        options.kind,
        tmp_dir=options.tmp_dir,
        jobs=options.jobs,
        verify=not options.dry_run,
    ) as source:
        if target.suffix == ".json":
            return _extract_data(source, target, options)
        tensors = select(_named(source), options.include, options.exclude)
        aliases = aliases_of(tensors)
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
    """Return the model's tensors by their own names, and all others by where they are in the checkpoint."""
    weights = dict(source.weights)
    own = {id(tensor) for tensor in weights.values()}
    others = {name: tensor for name, tensor in source.tensors.items() if id(tensor) not in own}
    if doubled := weights.keys() & others.keys():
        raise UsageError(
            f"{min(doubled)!r} is the name of a weight and also where another tensor is, so that a file would have one "
            f"of them. Load the checkpoint with load_file() and save what you want with save_file()."
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
    if depth > 100:
        return "..."
    if isinstance(value, StoredTensor):
        return {"tensor": dtype_name(value.dtype), "shape": list(value.shape), **layout_of(value)}
    if isinstance(value, Mapping):
        refuse_doubles({repr(key): str(key) for key in value})
        return {str(key): _as_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json(item, depth + 1) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)
