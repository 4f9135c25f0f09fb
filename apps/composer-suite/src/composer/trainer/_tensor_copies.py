"""Copies of many tensors, each rank's own part of them, made by few kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["copies_of", "copy_all", "local_part"]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's own part of a tensor that may be spread over ranks; it shares the memory."""
    tensor = tensor.detach()
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # that of a DTensor
    return tensor if to_local is None else to_local()


@torch.no_grad()
def copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    """Write the values of tensors into others, one into each."""
    if to:
        torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]  # no public name


@torch.no_grad()
def copies_of(tensors: Sequence[Tensor], *, on_host: bool = False) -> list[Tensor]:
    """Return copies of tensors; on the host where the device has no room for them."""
    local = [local_part(tensor) for tensor in tensors]
    if not on_host:
        try:
            copies = [torch.empty_like(tensor) for tensor in local]
        except torch.OutOfMemoryError:
            on_host = True
        else:
            copy_all(copies, local)
            return copies
    return [tensor.to("cpu", copy=True) for tensor in local]
