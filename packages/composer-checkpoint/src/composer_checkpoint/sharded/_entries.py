"""Entries into which torch flattens a nested state dict, and checks for those that it cannot save."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from composer_checkpoint._tree import doubled, path_text
from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.sharded._metadata import MAX_NAME_CHARS, MAX_STEPS

__all__ = [
    "refuse_unfit_entries",
    "refuse_sparse_entries",
    "refuse_unmeasured",
    "refuse_without_elements",
    "flatten_as_torch_2_3",
]

Path = tuple[str | int, ...]
Kinds = tuple[type, ...]


def refuse_unfit_entries(state_dict: Mapping[Any, Any], tensor_kinds: Kinds = (torch.Tensor,)) -> None:
    """Raise if two entries have the same name, which is their path joined by dots, or a name is too long to be read.

    Args:
        state_dict: Nested dicts and lists.
        tensor_kinds: Types that stand for tensors. A list without any of them is one entry.

    Raises:
        IncompatibleCheckpointError: If two entries have the same name, even if one is an empty dict, or a name is
            longer or deeper than the reader accepts.

    Example:
        >>> refuse_unfit_entries({"a": {"c": 1}, "a.c": 2})
        Traceback (most recent call last):
        composer_checkpoint.errors.IncompatibleCheckpointError: ['a']['c'] and ['a.c'] would both be called 'a.c' in ...
    """
    known: dict[str, Path] = {}
    for path in _entries(state_dict, tensor_kinds):
        name = ".".join(map(str, path))
        if name in known:
            raise doubled(path_text(known[name]), path_text(path), name, "a sharded checkpoint")
        if len(name) > MAX_NAME_CHARS or len(path) > MAX_STEPS:
            raise IncompatibleCheckpointError(
                f"{path_text(path):.200} has a name of {len(name)} characters and {len(path)} keys, and of a sharded "
                f"checkpoint no more than {MAX_NAME_CHARS} and {MAX_STEPS} are read. Give it shorter keys, or save one "
                f".pt file with save_file() or state_dict_type='full'."
            )
        known[name] = path


def refuse_sparse_entries(entries: Mapping[str, Any], paths: Mapping[str, Path], verb: str = "saves") -> None:
    """Raise if a tensor is sparse or quantized, for which torch's format has no description.

    Args:
        entries: Entries by name.
        paths: Keys of the path to each, where known.
        verb: Verb of the message, for what happens to dense tensors.

    Raises:
        IncompatibleCheckpointError: If there is such a tensor.
    """
    for name, value in entries.items():
        path = "/".join(map(str, paths.get(name, (name,))))
        if isinstance(value, torch.Tensor) and value.is_quantized:
            raise IncompatibleCheckpointError(
                f"{path} is quantized, as {value.dtype}, and a sharded checkpoint {verb} plain ones alone. Keep its "
                f"int_repr() and its scale, or save one .pt file, with save_file() or state_dict_type='full'."
            )
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise IncompatibleCheckpointError(
                f"{path} is a tensor of layout {value.layout}, and a sharded checkpoint {verb} dense ones alone. Make "
                f"it dense, as to_dense() does, or keep sparse ones in one .pt file, with save_file() or "
                f"state_dict_type='full'."
            )
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    refuse_unmeasured(("/".join(map(str, paths.get(name, (name,)))), value.dtype) for name, value in tensors.items())


def refuse_unmeasured(dtypes: Iterable[tuple[str, torch.dtype]]) -> None:
    """Raise if a tensor has a dtype of bits, such as `torch.bits8`, whose size torch's format does not know.

    Args:
        dtypes: Pairs of a tensor's name and its dtype.

    Raises:
        IncompatibleCheckpointError: If there is such a dtype.
    """
    for name, dtype in dtypes:
        if str(dtype).startswith("torch.bits"):
            raise IncompatibleCheckpointError(
                f"{name} is {dtype}, and a sharded checkpoint takes no dtypes of bits. Save its view(torch.uint8), "
                f"write one .pt file, or leave it out."
            )


def refuse_without_elements(entries: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
    """Raise if a tensor is on the meta device, where it has no elements to save.

    Args:
        entries: Entries by name.
        paths: Keys of the path to each, where known.

    Raises:
        TypeError: If there is such a tensor.
    """
    for name, value in entries.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise TypeError(
                f"{'/'.join(map(str, paths.get(name, (name,))))} is on the meta device, where it has no elements to "
                f"save. Give the model memory and weights first, as to_empty() and load_state_dict() do."
            )


def _entries(value: Any, tensor_kinds: Kinds, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of entries, recursively like torch itself."""
    if len(path) > MAX_STEPS:  # refused by the caller; the nesting may even be circular
        yield path
    elif isinstance(value, Mapping):
        # An empty dict is an entry, since WholeSavePlanner saves it.
        if not value and path:
            yield path
        for key, item in value.items():
            yield from _entries(item, tensor_kinds, (*path, key))
    elif _is_taken_apart(value, tensor_kinds):
        for index, item in enumerate(value):
            yield from _entries(item, tensor_kinds, (*path, index))
    else:
        yield path


def _is_taken_apart(value: Any, tensor_kinds: Kinds) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, (Mapping, *tensor_kinds)) or _is_taken_apart(item, tensor_kinds) for item in value
    )


def flatten_as_torch_2_3(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the entries by name and their paths, flattened as torch 2.3 and earlier did.

    torch 2.4 and later flatten every dict. Earlier releases kept a dict without tensors or nested containers of
    tensors as one entry, such as the groups of an optimizer.

    Example:
        >>> flat, paths = flatten_as_torch_2_3({"optim": {"groups": [{"lr": 0.1}]}, "w": torch.ones(1)})
        >>> sorted(flat)
        ['optim', 'w']
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    # Reversed, since the last item is popped first.
    pending: list[tuple[Path, Any]] = [((str(key),), value) for key, value in reversed([*state_dict.items()])]
    while pending:
        path, value = pending.pop()
        if _is_entry(value):
            name = ".".join(map(str, path))
            flat[name], paths[name] = value, path
        elif isinstance(value, Mapping):
            pending.extend(((*path, str(key)), item) for key, item in reversed([*value.items()]))
        else:
            pending.extend(((*path, i), item) for i, item in reversed(list(enumerate(value))))
    return flat, paths


def _is_entry(value: object) -> bool:
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list):
        items = value
    else:
        return True
    return not any(
        isinstance(item, torch.Tensor) or (isinstance(item, Mapping | list) and not _is_entry(item)) for item in items
    )
