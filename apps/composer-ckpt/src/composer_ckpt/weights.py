"""A checkpoint's weights under the names and in the precision that the target shall have."""

import argparse

from composer_checkpoint import CorruptCheckpointError
from composer_checkpoint.tensors import StoredTensor, TensorSource, tensors_in
from composer_ckpt.outcomes import UsageError
from composer_ckpt.plans import casts
from composer_ckpt.selection import cast, rename, renamed_by, select

__all__ = ["chosen_weights", "notes_on_the_rest", "without_wrappers"]

_MAX_NAMES = 5

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def chosen_weights(
    source: TensorSource, options: argparse.Namespace
) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, int]]:
    """Return the weights that are converted, new names by old ones, and how many change their dtype to which.

    Raises:
        CorruptCheckpointError: If an index promises more than there is.
        UsageError: If there are none, or two would have one name.
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
    return converted, renamed, casts(weights, converted)


def notes_on_the_rest(source: TensorSource) -> list[str]:
    """Return what the user should know of what is no weight of the model, and is not written."""
    notes: list[str] = []
    if no_tensors := source.beside_weights:
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
    """Return a weight's name without what `torch.compile` and checkpointing put into it.

    Example:
        >>> without_wrappers("layer._orig_mod.weight")
        'layer.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
