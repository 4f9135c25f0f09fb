"""Weights of a checkpoint: dtypes, selection, and their names and precision in the target."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch

from composer_checkpoint import CorruptCheckpointError, IncompatibleCheckpointError
from composer_checkpoint.formats.tensor_source import are_one
from composer_checkpoint.tensors import StoredTensor, TensorSource, tensors_in
from composer_ckpt.options import ConvertOptions
from composer_ckpt.output import UsageError, first_few

Weights = dict[str, StoredTensor]

BLOCK_NUMEL = 1 << 20
"""Elements that are read at a time, so that tensors of any size fit in memory."""


def blocks_of(*tensors: StoredTensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the elements of dense tensors of one size, block by block and next to each other."""
    numel = tensors[0].numel
    for start in range(0, numel, BLOCK_NUMEL):
        yield tuple(tensor.read_range(start, min(BLOCK_NUMEL, numel - start)) for tensor in tensors)


def num_unequal(a: StoredTensor, b: StoredTensor) -> int:
    """Return the number of elements of other bytes, since NaN is not equal to itself."""
    size = a.dtype.itemsize
    return sum(
        int((one.view(torch.uint8) != other.view(torch.uint8)).reshape(-1, size).any(1).sum())
        for one, other in blocks_of(a, b)
    )


def layout_of(tensor: StoredTensor) -> dict[str, str]:
    """Return the layout of a sparse tensor; nothing for a dense one."""
    return {} if tensor.sparse is None else {"layout": str(tensor.sparse.layout).removeprefix("torch.")}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


@cache
def has_numbers(dtype: torch.dtype) -> bool:
    """Return whether torch can convert the elements of a dtype to numbers.

    Example:
        >>> has_numbers(torch.float8_e4m3fn), has_numbers(torch.bits8)
        (True, False)
    """
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        return False  # the value of an element depends on a scale
    wide = torch.complex128 if dtype.is_complex else torch.float64
    # Support depends on the release of torch, so a conversion is tried.
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(wide)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def refuse_without_numbers(name: str, dtype: torch.dtype, what: str, instead: str) -> None:
    """Raise an `IncompatibleCheckpointError` if torch cannot convert the elements to numbers, which `what` needs."""
    if not has_numbers(dtype):
        raise IncompatibleCheckpointError(
            f"{name} is {dtype}, with whose elements torch does not compute, and {what} needs numbers. {instead}"
        )


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The scales of quantized weights must keep their dtype.
_SCALES = ("_scale", ".scales", ".zeros")


def select(
    tensors: Mapping[str, StoredTensor],
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    option: str = "--include",
) -> Weights:
    """Return the tensors whose names match a pattern of `include`, if it is given, and none of `exclude`.

    `option` is the name of the option for `include`, for messages.
    """
    for given_by, patterns in ((option, include), ("--exclude", exclude)):
        for pattern in patterns or ():
            # A pattern without a match is most likely a typo.
            if not any(fnmatchcase(name, pattern) for name in tensors):
                raise UsageError(
                    f"{given_by} {pattern!r} fits none of the {len(tensors)} names: {first_few(list(tensors))}."
                )
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (not include or any(fnmatchcase(name, pattern) for pattern in include))
        and not any(fnmatchcase(name, pattern) for pattern in exclude or ())
    }


def rename(
    names: Mapping[str, str], renames: Sequence[str] | None = None, prefixes: Sequence[str] | None = None
) -> dict[str, str]:
    r"""Return the names without the given prefixes and then with each `OLD=NEW` applied, by the same keys.

    Example:
        >>> rename({"model.h.0.w": "model.h.0.w"}, [r"h[.](\d+)=layers.\1"], ["model."])
        {'model.h.0.w': 'layers.0.w'}
    """
    for prefix in prefixes or ():
        names = {name: current.removeprefix(prefix) for name, current in names.items()}
    for text in renames or ():
        old, equals, new = text.partition("=")
        try:
            names = {name: re.sub(old, new, current) for name, current in names.items()}
        except re.error as error:
            raise UsageError(f"--rename {text!r}: {error}. Give OLD=NEW with a regular expression.") from error
        if not equals or not old:
            raise UsageError(f"--rename {text!r} is not OLD=NEW.")
    return dict(names)


def renamed_by(tensors: Mapping[str, StoredTensor], name_of: Callable[[str], str]) -> Weights:
    """Return the tensors under other names. Aliases of one tensor may get the same name, and are then merged."""
    return {name_of(name): tensor for name, tensor in once_each(tensors, name_of).items()}


def once_each(tensors: Mapping[str, StoredTensor], name_of: Callable[[str], str]) -> Weights:
    """Return the tensors without aliases that get the same name as another one."""
    firsts: dict[str, str] = {}
    for name, tensor in tensors.items():
        new = name_of(name)
        first = firsts.setdefault(new, name)
        if not are_one(tensors[first], tensor):
            refuse_doubles([(first, new), (name, new)])
    return {name: tensors[name] for name in firsts.values()}


def refuse_doubles(names: Iterable[tuple[str, str]]) -> None:
    """Raise a `UsageError` if two names become the same, given as pairs of old and new names."""
    taken: dict[str, str] = {}
    for name, new in names:
        other = taken.setdefault(new, name)
        if other != name:
            raise UsageError(f"{other!r} and {name!r} would both be called {new!r}. Rename one, or exclude it.")


def cast(tensors: Mapping[str, StoredTensor], precision: str) -> Weights:
    """Return floating point tensors in another precision, converted directly, and all others unchanged."""
    if precision == "keep":
        return dict(tensors)
    dtype = _DTYPES[precision]
    converted = {name for name, t in tensors.items() if t.dtype.is_floating_point and not name.endswith(_SCALES)}
    for name in sorted(converted):
        instead = "Leave it out with --exclude, or give --output-precision keep."
        refuse_without_numbers(name, tensors[name].dtype, f"--output-precision {precision}", instead)
    return {name: tensor.to(dtype) if name in converted else tensor for name, tensor in tensors.items()}


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def choose_weights(
    source: TensorSource, options: ConvertOptions, names_with_nan: dict[str, None]
) -> tuple[Weights, dict[str, str], dict[str, int]]:
    """Return the weights to convert, their new names by old ones, and the number of weights by the change of dtype.

    As the weights are read, the names of those with NaN are added to `names_with_nan`.
    """
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
    chosen = {name: _noting_nan(name, stored, names_with_nan) for name, stored in converted.items()}
    return chosen, {before: after for before, after in names.items() if before != after}, dict(changes)


def _noting_nan(name: str, stored: StoredTensor, found: dict[str, None]) -> StoredTensor:
    if not stored.dtype.is_floating_point or not has_numbers(stored.dtype) or stored.sparse is not None:
        return stored

    def look(tensor: torch.Tensor) -> torch.Tensor:
        # In pieces, since `isnan` allocates a mask.
        if name not in found and any(piece.float().isnan().any() for piece in tensor.flatten().split(BLOCK_NUMEL)):
            found[name] = None
        return tensor

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
    """Return a weight's name without the parts that `torch.compile`, FSDP and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def differences(a: Mapping[str, Any], b: Mapping[str, Any], only_a: str, only_b: str) -> str:
    """Return the differences in the names and shapes of two models' weights, `''` without any."""
    lists = (
        (only_a, [name for name in a if name not in b]),
        (only_b, [name for name in b if name not in a]),
        ("of another shape", [name for name in a if name in b and tuple(a[name].shape) != tuple(b[name].shape)]),
    )
    return "; ".join(f"{len(found)} {what}: {first_few(found)}" for what, found in lists if found)
