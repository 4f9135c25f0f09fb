"""Weights of a checkpoint under the names and in the precision of the target."""

import argparse
from dataclasses import replace

import torch

from composer_checkpoint import CorruptCheckpointError
from composer_checkpoint.tensors import StoredTensor, TensorSource, tensors_in
from composer_ckpt.dtypes import has_numbers
from composer_ckpt.output import UsageError, counted
from composer_ckpt.plans import casts
from composer_ckpt.selection import cast, rename, renamed_by, select

__all__ = ["chosen_weights", "notes_on_nan", "notes_on_the_rest", "without_wrappers"]

_MAX_NAMES = 5
_PIECE = 1 << 20  # elements

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def chosen_weights(
    source: TensorSource, options: argparse.Namespace
) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, int]]:
    """Return the weights to convert, new names by old ones, and the number of weights for each change of dtype.

    As the weights are read, the names of those with NaN are added to `options.names_with_nan`.

    Raises:
        CorruptCheckpointError: If tensors of an index are missing.
        UsageError: If there are no weights, or two get the same name.
    """
    """
    """
    if source.missing:
        raise CorruptCheckpointError(
            f"{options.source}: {len(source.missing)} tensors of the index are in no file: "
            f"{', '.join(source.missing[:5])}. Bring the files back, or use another checkpoint."
        )
    weights = dict(source.weights)
    if not weights:
        some = ", ".join(list(source.tensors)[:5]) or "no tensors"
        raise UsageError(
            f"SRC={options.source!r} has no weights of a model under state/model, model, module or at its top, but "
            f"{some}. Name another checkpoint."
        )
    weights = select(weights, options.include, options.exclude)
    if not weights:
        raise UsageError("--include and --exclude leave none of the tensors. Choose some.")
    names = rename({name: without_wrappers(name) for name in weights}, options.rename, options.strip_prefix)
    weights = renamed_by(weights, names.__getitem__)
    renamed = {before: after for before, after in names.items() if before != after}
    converted = cast(weights, options.output_precision)
    options.names_with_nan = dict[str, None]()
    looked_at = {name: _noting_nan(name, stored, options.names_with_nan) for name, stored in converted.items()}
    return looked_at, renamed, casts(weights, converted)


def _noting_nan(name: str, stored: StoredTensor, found: dict[str, None]) -> StoredTensor:
    if not stored.dtype.is_floating_point or not has_numbers(stored.dtype) or stored.sparse is not None:
        return stored

    def look(tensor: torch.Tensor) -> torch.Tensor:
        pieces = tensor.flatten().split(_PIECE)  # in pieces, since `isnan` allocates a mask
        if name not in found and any(bool(piece.float().isnan().any()) for piece in pieces):
            found[name] = None
        return tensor

    in_parts = stored.fetch_range
    return replace(
        stored,
        fetch=lambda: look(stored.fetch()),
        fetch_range=None if in_parts is None else lambda start, count: look(in_parts(start, count)),
    )


def notes_on_nan(options: argparse.Namespace) -> list[str]:
    """Return notes on weights with NaN, after all have been read."""
    names = list(options.names_with_nan)
    return [f"NaN in {counted(len(names), 'tensor')}, written as it is: {_some(names)}"] if names else []


def notes_on_the_rest(source: TensorSource) -> list[str]:
    """Return notes on entries that are not weights of the model and are not written."""
    notes: list[str] = []
    if no_tensors := source.non_weight_entries:
        notes.append(f"left out of the model, since they are no tensors: {_some(no_tensors)}")
    tree = source.tree if source.format in ("pt", "pickle") and isinstance(source.tree, dict) else {}
    taken = {id(tensor) for tensor in source.weights.values()}
    others = [
        str(key)
        for key, value in tree.items()
        if (tensors := tensors_in({key: value})) and not any(id(tensor) in taken for tensor in tensors.values())
    ]
    if others:
        notes.append(f"left out, since they are beside the model: {_some(others)}")
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def without_wrappers(name: str) -> str:
    """Return a weight's name without the parts that `torch.compile`, FSDP and activation checkpointing insert.

    Example:
        >>> without_wrappers("layer._orig_mod.weight")
        'layer.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
