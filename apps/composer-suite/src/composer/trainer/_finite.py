"""Whether tensors are finite, answered on their device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from composer_dist.strategy import canonical_name

_PLAIN = {Tensor}  # what needs no look at each


def note_non_finite(tensors: list[Tensor], found: Tensor, one: Tensor) -> bool:
    """Set `found` to 1 if any of the tensors holds an Inf or a NaN, and leave it as it is otherwise.

    Nobody waits for the device.

    Args:
        tensors: On one device. None of their values changes.
        found: A float32 scalar on that device.
        one: A 1, of the same kind.

    Returns:
        Whether `found` speaks of whole tensors: of sharded ones it speaks of this rank's parts.
    """
    is_plain = {*map(type, tensors)} == _PLAIN
    try:
        # The one kernel that looks at many tensors: GradScaler's, told to divide by 1. A sum of norms, which is the
        # public way, takes five times as long. Given DTensors, it asks the ranks that share the first of them, who
        # need not be those that share the others.
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
            tensors if is_plain else [_local(tensor) for tensor in tensors], found, one
        )
    except (NotImplementedError, RuntimeError):  # sparse, complex, or several kinds
        values = [values for tensor in tensors if (values := _values(tensor)).numel()]
        if values:
            norms = torch.stack([torch.linalg.vector_norm(part, torch.inf).to(found) for part in values])
            found.logical_or_(~torch.isfinite(norms).all())
    return is_plain or not any(is_sharded(tensor) for tensor in tensors)


def names_of_bad(tensors: Iterable[tuple[str, Tensor]], *, may_be_marked: bool = False) -> str:
    """Return the names of the first tensors that are not finite. It waits for the device.

    Args:
        tensors: With their names.
        may_be_marked: Whether the first number of each rank's part of a tensor may be a mark, which says that others
            are not finite. It counts only where there are no others.
    """
    named = list(tensors)
    names = [name for name, tensor in named if not _is_finite(tensor, 1)] if may_be_marked else []
    names = [canonical_name(name) for name in names or (name for name, tensor in named if not _is_finite(tensor))]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_finite(tensor: Tensor, num_marks: int = 0) -> bool:
    """Say whether a tensor is finite, behind so many numbers of each rank's part if it is sharded."""
    found = torch.zeros((), device=tensor.device)
    part = _local(tensor).flatten()[num_marks:] if is_sharded(tensor) else tensor
    note_non_finite([part], found, torch.ones_like(found))
    if is_sharded(tensor):
        found = _over_ranks(found, tensor)
    return not found.item()


def _over_ranks(found: Tensor, tensor: Any) -> Tensor:
    """Return what any of the ranks that share a tensor has found."""
    from torch.distributed.tensor import DTensor, Partial  # loaded where there are such tensors, and slow to

    mesh = tensor.device_mesh
    return DTensor.from_local(found, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()


def _values(tensor: Any) -> Tensor:
    """Return what this rank has of a tensor, densely."""
    local = _local(tensor)
    if local.layout is torch.sparse_coo:
        return local.coalesce().values()
    return local if local.layout is torch.strided else local.values()


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # nobody differentiates by it
        return tensor.to_local()


def is_sharded(tensor: Tensor) -> bool:
    """Say whether a tensor is a DTensor, whose module takes a third as long to import as torch itself."""
    return hasattr(tensor, "to_local")
