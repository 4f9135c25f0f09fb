"""Selection, renaming and casting of tensors."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from composer_ckpt.output import UsageError, first_few

if TYPE_CHECKING:
    from composer_checkpoint.tensors import StoredTensor

T = TypeVar("T")

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The scales of quantized weights must keep their dtype.
_SCALES = ("_scale", ".scales", ".zeros")


def select(
    tensors: Mapping[str, T],
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    option: str = "--include",
) -> dict[str, T]:
    """Return the tensors whose names match a pattern of `include`, if it is given, and none of `exclude`.

    Args:
        tensors: Tensors by name.
        include: Shell patterns.
        exclude: Shell patterns.
        option: Name of the option for `include`, for messages.

    Example:
        >>> select({"h.0.weight": 1, "h.0.bias": 2, "wte": 3}, ["h.*"], ["*bias"])
        {'h.0.weight': 1}
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


def renamed_by(tensors: "Mapping[str, StoredTensor]", name_of: Callable[[str], str]) -> "dict[str, StoredTensor]":
    """Return the tensors under other names. Aliases of one tensor may get the same name, and are then merged."""
    return {name_of(name): tensor for name, tensor in once_each(tensors, name_of).items()}


def once_each(tensors: "Mapping[str, StoredTensor]", name_of: Callable[[str], str]) -> "dict[str, StoredTensor]":
    """Return the tensors without aliases that get the same name as another one."""
    from composer_checkpoint.formats.tensor_source import are_one  # imports torch, which would slow down `--help`

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


def cast(tensors: "Mapping[str, StoredTensor]", precision: str) -> "dict[str, StoredTensor]":
    """Return floating point tensors in another precision, converted directly, and all others unchanged."""
    if precision == "keep":
        return dict(tensors)
    import torch

    from composer_ckpt.dtypes import refuse_without_numbers

    dtype: torch.dtype = getattr(torch, _DTYPES[precision])
    converted = {name for name, t in tensors.items() if t.dtype.is_floating_point and not name.endswith(_SCALES)}
    for name in sorted(converted):
        instead = "Leave it out with --exclude, or give --output-precision keep."
        refuse_without_numbers(name, tensors[name].dtype, f"--output-precision {precision}", instead)
    return {name: tensor.to(dtype) if name in converted else tensor for name, tensor in tensors.items()}
