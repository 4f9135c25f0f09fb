"""Reading a set of per-rank files tensor by tensor, each put together from what the ranks hold."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from composer_checkpoint._tree import map_tree
from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.local_files import LAYOUT_KEY, SAVE_ID_KEY, refuse_mixed_saves
from composer_checkpoint.tensors.pt_source import open_pt_source
from composer_checkpoint.tensors.source import StoredTensor, TensorSource

__all__ = ["layout_of", "open_local_source"]

_RANK = "{rank}"


def open_local_source(path: str | os.PathLike[str]) -> TensorSource:
    """Open the files that `save_local` wrote. Plain data is rank 0's, except for `rng`, which has every rank's.

    Args:
        path: With `{rank}` in it.

    Raises:
        NoCheckpointError: If files are missing; the message names them.
        CorruptCheckpointError: If they are not of one save.
    """
    template = os.fspath(path)
    first = open_pt_source(_of_rank(template, 0))
    sources = [first]
    try:
        world_size = _layout(first, template)["world_size"]
        missing = [file for rank in range(world_size) if not os.path.exists(file := _of_rank(template, rank))]
        if missing:
            raise NoCheckpointError(
                f"{len(missing)} of the files of {world_size} ranks are missing: {', '.join(missing[:8])}. Bring them "
                f"together in one folder."
            )
        sources += [open_pt_source(_of_rank(template, rank)) for rank in range(1, world_size)]
        layouts = [_layout(source, template) for source in sources]
        refuse_mixed_saves([layout.get(SAVE_ID_KEY) for layout in layouts], template)
        tree = _merged(sources, layouts)
    except BaseException:
        for source in sources:
            source.close()
        raise
    files = {Path(_of_rank(template, rank)).name: source.size_bytes for rank, source in enumerate(sources)}
    merged = TensorSource("local", tree, sum(files.values()), first.manifest, files=files)
    for source in sources:
        merged.on_close(source)
    return merged


def layout_of(tree: Any) -> Mapping[str, Any] | None:
    """Return how the tensors of a per-rank file are spread, `None` for other files."""
    layout = tree.get(LAYOUT_KEY) if isinstance(tree, dict) else None
    return layout if isinstance(layout, dict) else None


def _of_rank(template: str, rank: int) -> str:
    return template.replace(_RANK, str(rank))


def _layout(source: TensorSource, template: str) -> Mapping[str, Any]:
    layout = layout_of(source.tree)
    counts = layout is not None and all(type(layout.get(key)) is int for key in ("world_size", "rank"))
    if layout is None or not counts or not isinstance(layout.get("tensors"), dict):
        raise CorruptCheckpointError(
            f"{template} has no {LAYOUT_KEY!r}, so it is no per-rank file. Name it as a single file."
        )
    return layout


def _merged(sources: Sequence[TensorSource], layouts: Sequence[Mapping[str, Any]]) -> Any:
    spread = layouts[0]["tensors"]

    def change(name: str, value: Any) -> Any:
        is_spread = isinstance(value, StoredTensor) and name in spread
        return _whole(name, sources, layouts) if is_spread else value

    tree = map_tree(sources[0].tree, change)
    rng = [source.tree.get("rng") for source in sources]
    if all(isinstance(states, list) for states in rng):
        tree["rng"] = [state for states in rng for state in states]
    return {key: value for key, value in tree.items() if key != LAYOUT_KEY}


def _whole(name: str, sources: Sequence[TensorSource], layouts: Sequence[Mapping[str, Any]]) -> StoredTensor:
    parts: dict[tuple[int, ...], StoredTensor] = {}
    shape = tuple(layouts[0]["tensors"][name]["global_shape"])
    for source, layout in zip(sources, layouts, strict=True):
        part = source.tensors.get(name)
        if part is None or part.sparse is not None or name not in layout["tensors"]:
            raise CorruptCheckpointError(f"a rank's file lacks {name!r:.200}. Bring together the files of one save.")
        if part.numel:
            parts.setdefault(tuple(layout["tensors"][name]["offsets"]), part)
    covered = sum(part.numel for part in parts.values())
    dtype = sources[0].tensors[name].dtype

    def fetch() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for offsets, part in parts.items():
            region = whole
            for dim, (start, length) in enumerate(zip(offsets, part.shape, strict=True)):
                region = region.narrow(dim, start, length)
            region.copy_(part.read())
        return whole

    same = tuple(part.storage for part in parts.values())  # all parts of two names are one, or they are no one tensor
    merged = StoredTensor(dtype, shape, fetch, None if None in same else same)
    if covered != merged.numel:
        raise CorruptCheckpointError(
            f"the files hold {covered} of the {merged.numel} elements of {name!r:.200}. Bring together the files of "
            f"one save."
        )
    return merged
