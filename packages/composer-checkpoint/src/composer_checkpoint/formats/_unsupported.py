"""Checks that refuse content that a format cannot represent, before anything is written."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from composer_checkpoint._tree import encode, map_tree, named_leaves, refuse_doubled
from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.formats.pt import refuse_unsafe_objects
from composer_checkpoint.formats.safetensors import FORMAT_NAMES, check_names
from composer_checkpoint.formats.tensor_source import StoredTensor, as_stored, refuse_sparse
from composer_checkpoint.sharded.load import refuse_bits, refuse_unfit_entries

__all__ = ["refuse_doubled_names", "Target", "refuse_quantized", "refuse_unfit"]

Target = Literal["pt", "safetensors", "dcp", "local"]
"""Target format: a `.pt` or a `.safetensors` file, a sharded folder, or per-rank files."""

_CALLED = {
    "pt": "a .pt file",
    "safetensors": "safetensors",
    "dcp": "a sharded checkpoint",
    "local": "a set of per-rank files",
}


def refuse_unfit(
    tree: Any,
    target: Target,
    path: str | os.PathLike[str],
    *,
    what: str | None = None,
    aliases: Iterable[str] = (),
) -> None:
    """Refuse a tree that cannot be written, as far as that is known without reading a tensor.

    Planning calls this too, so that a plan is refused for the same reasons as the write.

    Args:
        tree: Dicts, lists and tuples of `StoredTensor`s, tensors and plain data; for `'safetensors'`, tensors by name.
        target: The format.
        path: Path of the output, for messages.
        what: Name of the format in messages.
        aliases: Further names of tensors, for `'safetensors'`.

    Raises:
        IncompatibleCheckpointError: If the format does not support a sparse or quantized tensor, or a name.
        TypeError: If the format does not support a tensor's dtype.
        UnsafeCheckpointError: If the tree has anything other than data.

    Example:
        >>> refuse_unfit({"w": as_stored(torch.ones(2, dtype=torch.complex128))}, "safetensors", "out.safetensors")
        Traceback (most recent call last):
        TypeError: w is torch.complex128, which safetensors has no form for. Write a .pt file, or leave it out.
    """
    called = what or _CALLED[target]
    tensors = dict(tree) if target == "safetensors" else _tensors_in(tree)
    refuse_quantized(tensors, called)
    if target != "pt":
        refuse_sparse(tensors, called)
    if target == "safetensors":
        check_names([*tensors, *aliases])
        for name, tensor in tensors.items():
            if str(tensor.dtype).removeprefix("torch.") not in FORMAT_NAMES:
                raise TypeError(
                    f"{name} is {tensor.dtype}, which safetensors has no form for. Write a .pt file, or leave it out."
                )
        return
    if target == "dcp":
        for name, tensor in tensors.items():
            refuse_bits(name, tensor.dtype)
    if target != "pt":
        refuse_doubled_names(tree, target)
    # Tensors are known to be data, so they are left out of the search for other objects.
    plain, _ = encode(map_tree(tree, lambda _, value: None if isinstance(value, StoredTensor) else value))
    refuse_unsafe_objects(plain, os.fspath(path))


def refuse_quantized(tensors: Mapping[str, StoredTensor], what: str) -> None:
    """Refuse quantized tensors, since their scale is not stored, without which the elements have no meaning.

    Args:
        tensors: Tensors by name.
        what: Name of the format in the message.

    Raises:
        IncompatibleCheckpointError: If a tensor is quantized.
    """
    for name, tensor in tensors.items():
        if tensor.is_quantized:
            raise IncompatibleCheckpointError(
                f"{name} is quantized, as {tensor.dtype}, and {what} takes plain tensors only. Leave it out, or load "
                f"the file with load_file() and make it plain with dequantize()."
            )


def _tensors_in(tree: Any) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, leaf in named_leaves(tree):
        if isinstance(leaf, StoredTensor):
            found[name] = leaf
        elif isinstance(leaf, torch.Tensor):
            found[name] = as_stored(leaf)
    return found


def refuse_doubled_names(tree: Any, target: Literal["dcp", "local"]) -> None:
    """Refuse two items that get the same name once the keys of their paths are joined as the format joins them.

    Args:
        tree: Dicts and lists of `StoredTensor`s, tensors and plain data.
        target: `'dcp'` for sharded folders, which join keys by dots, or `'local'` for per-rank files, which join them
            by slashes.

    Raises:
        IncompatibleCheckpointError: With the paths of both items, or of one that is too long for a folder.
    """
    if target == "dcp":
        refuse_unfit_entries(tree, (StoredTensor, torch.Tensor))
    else:
        refuse_doubled(tree, (StoredTensor, torch.Tensor), "/", "the layout of per-rank files")
