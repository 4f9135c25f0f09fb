"""Weights of a checkpoint under the names and in the precision of the target."""

from collections import Counter
from dataclasses import dataclass, replace

import torch

from composer_checkpoint import CorruptCheckpointError
from composer_checkpoint.tensors import StoredTensor, TensorSource, tensors_in
from composer_ckpt.dtypes import BLOCK_NUMEL, dtype_name, has_numbers
from composer_ckpt.options import ConvertOptions
from composer_ckpt.output import UsageError, first_few
from composer_ckpt.selection import cast, rename, renamed_by, select

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """The weights to convert."""

    tensors: dict[str, StoredTensor]
    renamed: dict[str, str]  # new names by old ones
    cast: dict[str, int]  # number of weights by the change of dtype
    names_with_nan: dict[str, None]  # filled as the weights are read


def choose_weights(source: TensorSource, options: ConvertOptions) -> ChosenWeights:
    """Return the weights to convert."""
    if source.missing:
        raise CorruptCheckpointError(
            f"{options.source}: {len(source.missing)} tensors of the index are in no file: "
            f"{first_few(source.missing)}. Restore the files, or use another checkpoint."
        )
    weights = dict(source.weights)
    if not weights:
        raise UsageError(
            f"SRC={options.source!r} has no weights of a model under state/model, model, module or at its top, but "
            f"{first_few(list(source.tensors)) or 'no tensors'}. Name another checkpoint."
        )
    weights = select(weights, options.include, options.exclude)
    if not weights:
        raise UsageError("--include and --exclude leave none of the tensors. Choose some.")
    names = rename({name: without_wrappers(name) for name in weights}, options.rename, options.strip_prefix)
    weights = renamed_by(weights, names.__getitem__)
    converted = cast(weights, options.output_precision)
    changes = Counter(
        f"{dtype_name(weights[name].dtype)} -> {dtype_name(tensor.dtype)}"
        for name, tensor in converted.items()
        if weights[name].dtype != tensor.dtype
    )
    nan: dict[str, None] = {}
    return ChosenWeights(
        {name: _noting_nan(name, stored, nan) for name, stored in converted.items()},
        {before: after for before, after in names.items() if before != after},
        dict(changes),
        nan,
    )


def _noting_nan(name: str, stored: StoredTensor, found: dict[str, None]) -> StoredTensor:
    if not stored.dtype.is_floating_point or not has_numbers(stored.dtype) or stored.sparse is not None:
        return stored

    def look(tensor: torch.Tensor) -> torch.Tensor:
        pieces = tensor.flatten().split(BLOCK_NUMEL)  # in pieces, since `isnan` allocates a mask
        if name not in found and any(bool(piece.float().isnan().any()) for piece in pieces):
            found[name] = None
        return tensor

    # Both ways of reading are wrapped, since a writer may read a tensor whole or range by range.
    in_parts = stored.fetch_range
    return replace(
        stored,
        fetch=lambda: look(stored.fetch()),
        fetch_range=None if in_parts is None else lambda start, count: look(in_parts(start, count)),
    )


def notes_on_the_rest(source: TensorSource) -> list[str]:
    """Return notes on entries that are not weights of the model and are not written."""
    notes: list[str] = []
    if no_tensors := source.non_weight_entries:
        notes.append(f"left out of the model, since they are not tensors: {first_few(no_tensors)}")
    tree = source.tree if source.format in ("pt", "pickle") and isinstance(source.tree, dict) else {}
    taken = {id(tensor) for tensor in source.weights.values()}
    others = [
        str(key)
        for key, value in tree.items()
        if (tensors := tensors_in({key: value})) and not any(id(tensor) in taken for tensor in tensors.values())
    ]
    if others:
        notes.append(f"left out, since they are not part of the model: {first_few(others)}")
    return notes


def without_wrappers(name: str) -> str:
    """Return a weight's name without the parts that `torch.compile`, FSDP and activation checkpointing insert.

    Example:
        >>> without_wrappers("layer._orig_mod.weight")
        'layer.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
