"""Whether tensors are finite, answered on their device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from composer_fsdp.names import clean_name


def note_non_finite(tensors: list[Tensor], found: Tensor, one: Tensor) -> bool:
    """Set `found` to 1 if any of the tensors holds an Inf or a NaN, and leave it as it is otherwise.

    Nobody waits for the device.

    Args:
        tensors: On one device. None of their values changes.
        found: A float32 scalar on that device.
        one: A 1, of the same kind.

    Returns:
        Whether `found` speaks of all ranks' parts of the tensors where these are sharded.
    """
    try:
        # The one kernel that looks at many tensors: GradScaler's, told to divide by 1. A sum of norms, which is the
        # public way, takes five times as long. Of DTensors it looks at all ranks' parts.
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)  # pyright: ignore[reportPrivateImportUsage]
    except (NotImplementedError, RuntimeError):  # sparse, complex, or several kinds
        values = [values for tensor in tensors if (values := _values(tensor)).numel()]
        if values:
            norms = torch.stack([torch.linalg.vector_norm(part, torch.inf).to(found) for part in values])
            found.logical_or_(~torch.isfinite(norms).all())
        return not any(_is_sharded(tensor) for tensor in tensors)
    return True


def note_infinite_norm(tensors: list[Tensor], found: Tensor) -> bool:
    """Do as `note_non_finite` does, also where each element is finite and the norm is not.

    It takes a few times as long.
    """
    values = [_values(tensor) for tensor in tensors]
    norms = torch._foreach_norm(values)  # pyright: ignore[reportPrivateImportUsage]  # no public name
    if norms:
        norm = torch.linalg.vector_norm(torch.stack([norm.to(found) for norm in norms]))
        found.logical_or_(~torch.isfinite(norm))
    return not any(_is_sharded(tensor) for tensor in tensors)


def names_of_bad(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the names of the first tensors that are not finite. It waits for the device."""
    names = [clean_name(name) for name, tensor in tensors if not _is_finite(tensor)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_finite(tensor: Tensor) -> bool:
    found = torch.zeros((), device=tensor.device)
    note_non_finite([tensor], found, torch.ones_like(found))
    return not found.item()


def _values(tensor: Any) -> Tensor:
    """Return what this rank has of a tensor, densely."""
    local = tensor.to_local() if _is_sharded(tensor) else tensor
    if local.layout is torch.sparse_coo:
        return local.coalesce().values()
    return local if local.layout is torch.strided else local.values()


def _is_sharded(tensor: Tensor) -> bool:
    """Say whether a tensor is a DTensor, whose module takes a third as long to import as torch itself."""
    return hasattr(tensor, "to_local")
