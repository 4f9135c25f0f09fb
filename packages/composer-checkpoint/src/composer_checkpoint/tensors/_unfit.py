"""Refusing what a format has no form for, before any of it is written."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from composer_checkpoint._encoding import encode
from composer_checkpoint._more_than_data import refuse_more_than_data
from composer_checkpoint._tree import map_tree, named_leaves
from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.safetensors_file import FORMAT_NAMES, check_names
from composer_checkpoint.sharded._entries import refuse_unmeasured
from composer_checkpoint.tensors._doubled_names import refuse_doubled_names
from composer_checkpoint.tensors._sparse_parts import refuse_sparse
from composer_checkpoint.tensors.source import StoredTensor, as_stored

__all__ = ["Target", "refuse_quantized", "refuse_unfit"]

Target = Literal["pt", "safetensors", "dcp", "local"]
"""What is written: a `.pt` or a `.safetensors` file, a sharded folder, or per-rank files."""

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
    """Refuse a tree that could not be written, with all that is known without reading a tensor.

    Whoever only plans calls this, too, so that a plan is refused where writing would be.

    Args:
        tree: Dicts, lists and tuples of `StoredTensor`s, tensors and plain data; of `'safetensors'`, tensors by name.
        target: The format.
        path: Where it would be written to, for messages.
        what: What messages call the format.
        aliases: Of `'safetensors'`, further names of tensors.

    Raises:
        IncompatibleCheckpointError: If a tensor is sparse or quantized and cannot be, or of a name that cannot be.
        TypeError: If the format has nothing for a tensor's dtype.
        UnsafeCheckpointError: If anything is more than data.

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
        refuse_unmeasured((name, tensor.dtype) for name, tensor in tensors.items())
    if target != "pt":
        refuse_doubled_names(tree, target)
    plain, _ = encode(map_tree(tree, lambda _, value: None if isinstance(value, StoredTensor) else value))
    refuse_more_than_data(plain, os.fspath(path))


def refuse_quantized(tensors: Mapping[str, StoredTensor], what: str) -> None:
    """Refuse quantized tensors, which are not what they were without the scale that torch has beside their elements.

    Args:
        tensors: By name.
        what: What takes no quantized ones, for the message.

    Raises:
        IncompatibleCheckpointError: If there is one.
    """
    for name, tensor in tensors.items():
        if tensor.is_quantized:
            raise IncompatibleCheckpointError(
                f"{name} is quantized, as {tensor.dtype}, and {what} takes plain tensors alone. Leave it out, or load "
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
